from pathlib import Path

from engine.cache_folder import cache_folder


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("RHEO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("RHEO_CACHE")
    assert cache_folder() == Path("/b/rheo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "rheo"
