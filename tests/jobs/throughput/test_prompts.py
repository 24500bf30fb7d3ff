import json

import pytest

from engine.errors import UserError
from engine.models.loading import load_tokenizer
from jobs.throughput.prompts import PromptPool, read_texts


def write(path, *records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_files_are_mixed(tmp_path):
    write(tmp_path / "a.jsonl", {"prompt": "a0"}, {"turns": ["a1", "later"]}, {"prompt": "a2"})
    write(tmp_path / "b.jsonl", {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b0"}]})
    assert read_texts(str(tmp_path)) == ["a0", "b0", "a1", "a2"]
    assert read_texts([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")]) == ["b0", "a0", "a1", "a2"]


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '{"prompt": 3}', '{"turns": []}', '{"prompt": ""}'])
def test_a_line_without_text_is_refused(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n' + line + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl':2 has no text; allowed: a JSON object with `prompt`"):
        read_texts(str(tmp_path / "a.jsonl"))


def test_prompts_are_cut_or_joined_inside_the_template(models):
    """The template is: BOS text EOS w3."""
    pool = PromptPool(["w5 w6", "w7 w8 w9"], load_tokenizer(models / "target"), 100)

    def take(first: int, num_tokens: int | None):
        return pool.take(first, 2, num_tokens=num_tokens, num_output=8)

    assert take(0, None) == [[1, 5, 6, 2, 3], [1, 7, 8, 9, 2, 3]]
    assert take(3, 4) == [[1, 7, 2, 3], [1, 5, 2, 3]]
    assert take(0, 9) == [[1, 5, 6, 7, 8, 9, 5, 2, 3], [1, 7, 8, 9, 5, 6, 7, 2, 3]]
    assert pool.text(take(0, 4)[0]).split() == ["<s>", "w5", "</s>", "w3"]
