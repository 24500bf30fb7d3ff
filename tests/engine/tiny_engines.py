"""Models so small that an engine over them takes milliseconds, and what tests do with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine import Engine, Request, SamplingParams, Speculation
from engine.drafts.eagle3 import Eagle3Draft
from engine.models.checkpoint import load_eagle3
from engine.models.eagle3 import Eagle3Head
from engine.models.loading import load_causal_lm, load_tokenizer
from engine.target import Target
from tests.tiny_models import tiny_eagle3, tiny_llama

VOCAB, LAYERS = 24, 7  # with 7 layers the three features of the draft come from three different ones


@dataclass(kw_only=True)
class Tiny:
    """A target and a draft in folders, loaded once; engines share the weights and have caches of their own."""

    target_folder: Path
    draft_folder: Path
    _greedy: dict[tuple, list[int]] = field(default_factory=dict)

    def __post_init__(self):
        model = load_causal_lm(self.target_folder, torch.float32, "cpu")
        self.head: Eagle3Head = load_eagle3(
            self.draft_folder,
            target_config=model.config,
            embedding=model.get_input_embeddings().weight,
            dtype=torch.float32,
            device="cpu",
        )
        self.target = Target(model, self.head.feature_layers)
        self.tokenizer = load_tokenizer(self.target_folder)
        #: the same weights under transformers' own attention
        self.reference = LlamaForCausalLM.from_pretrained(self.target_folder, dtype=torch.float32).eval()

    def engine(self, method: str = "rheo", *, tree_size: int = 10, depth: int = 3, top_k: int = 4, **options: Any) -> Engine:
        names = ("m", "draft_top", "verification", "budget")
        speculation = {name: options.pop(name) for name in names if name in options}
        return Engine(
            self.target,
            Eagle3Draft(self.head, attention="sdpa"),
            options.pop("tokenizer", self.tokenizer),
            speculation=Speculation(method=method, tree_size=tree_size, depth=depth, top_k=top_k, **speculation),
            **options,
        )

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[T, V] of transformers' own forward pass."""
        return self.reference(torch.tensor([token_ids])).logits[0]

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """transformers' own greedy text."""
        key = (tuple(prompt), num_tokens)
        if key not in self._greedy:
            ids = torch.tensor([prompt])
            out = self.reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
            )
            self._greedy[key] = out[0, len(prompt) :].tolist()
        return self._greedy[key]


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Prompts of tokens that are neither unknown, BOS nor EOS."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


#: what the byte-level tokenizer of a clock spells; the ids go on from 3 (0 <unk>, 1 BOS, 2 EOS)
SPELLED = [b"a", b"b", b"c", b"ab", b" ", b"ha", b" ha", *(bytes([x]) for x in "é😀".encode()), b"\xc3\xa9x", b".", b"END", b"the", b"n"]
CLOCK_SIZE = 32


def spelled(*pieces: bytes | str) -> list[int]:
    """Token ids of pieces, each of which is one token."""
    return [3 + SPELLED.index(piece.encode() if isinstance(piece, str) else piece) for piece in pieces]


class Clock(Tiny):
    """A target in which one token follows each token, almost surely, and a draft that knows it: at T = 0 every draft is accepted.

    Layers add nothing, embeddings are one-hot, and the output head is the table: logit `sharpness` of the successor, 0 of all others.
    """

    sharpness = 12.0

    def __init__(self, folder: Path, successor: dict[int, int]):
        table = torch.zeros(CLOCK_SIZE, CLOCK_SIZE)
        for token in range(CLOCK_SIZE):
            table[successor.get(token, token), token] = 1
        target = tiny_llama(folder / "target", vocab=CLOCK_SIZE, hidden=CLOCK_SIZE, layers=LAYERS)
        config = LlamaConfig.from_pretrained(target, tie_word_embeddings=False)
        model = LlamaForCausalLM(config)
        draft = tiny_eagle3(folder / "draft", config)
        norm = (1 / CLOCK_SIZE + 1e-5) ** -0.5  # RMSNorm makes norm * e_t of the unit vector e_t
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            model.model.embed_tokens.weight.copy_(torch.eye(CLOCK_SIZE))
            model.lm_head.weight.copy_(table * self.sharpness / norm)
        model.save_pretrained(target)

        # the draft's feature is e_t; its MLP takes e_t away and puts e_successor in its place
        tensors = load_file(draft / "model.safetensors")
        eye, zero = torch.eye(CLOCK_SIZE), torch.zeros(CLOCK_SIZE, CLOCK_SIZE)
        inner = torch.nn.functional.silu(torch.tensor(norm)) * norm
        tensors.update(
            {
                "fc.weight": torch.cat([eye, zero, zero], 1),
                "midlayer.self_attn.o_proj.weight": zero,
                "midlayer.mlp.gate_proj.weight": torch.cat([eye, zero]),
                "midlayer.mlp.up_proj.weight": torch.cat([eye, zero]),
                "midlayer.mlp.down_proj.weight": torch.cat([(table - eye) / inner, zero], 1),
                "midlayer.post_attention_layernorm.weight": torch.ones(CLOCK_SIZE),
                "norm.weight": torch.ones(CLOCK_SIZE),
                "lm_head.weight": table * self.sharpness / norm,
            }
        )
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft / "model.safetensors")
        (target / "chat_template.jinja").unlink()
        _byte_level_tokenizer().save_pretrained(target)
        super().__init__(target_folder=target, draft_folder=draft)


def _byte_level_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = {}
    for text in (chr(code) for code in range(0x20, 0x250)):
        for byte, name in zip(text.encode(), alphabet.pre_tokenize_str(text)[0][0], strict=True):
            names[byte] = name
    for byte, name in zip("😀".encode(), alphabet.pre_tokenize_str("😀")[0][0], strict=True):
        names[byte] = name
    words = ["<unk>", "<s>", "</s>", *("".join(names[byte] for byte in piece) for piece in SPELLED)]
    words += [f"w{number}" for number in range(len(words), CLOCK_SIZE)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>")


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams] | None = None, **fields: Any):
    """Results of prompts given as token ids; none may fail."""
    many = params if isinstance(params, list) else [params] * len(prompts)
    results = engine.generate([Request(token_ids=prompt, params=each, **fields) for prompt, each in zip(prompts, many, strict=True)])
    assert [result.error for result in results] == [None] * len(prompts)
    return results
