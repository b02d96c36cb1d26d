"""A random model of two layers, made on the spot, and its independent reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import vllm
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 512


def make_models(folder: Path) -> dict[str, Any]:
    """Two folders of the same model, 660 KB each: without a tokenizer, and with one."""
    for path in (folder, with_tokenizer(folder)):
        make_model(path)
    _tokenizer().save_pretrained(with_tokenizer(folder))
    return {"vllm": vllm.__version__}


def make_model(folder: Path, layers: int = 2, width: int = 64) -> None:
    """Random weights, always the same ones; heads of 32, half as many for keys and values."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 32,
        head_dim=32,
        max_position_embeddings=1024,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def with_tokenizer(folder: Path) -> Path:
    """The model whose prompts can be text, beside the one in `folder`."""
    return folder.with_name("model-with-tokenizer")


def _tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token."""
    words = {f"<{number}>": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<0>", eos_token="<1>")


class Reference:
    """The same weights under transformers: one forward per token sequence, remembered."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._known: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}

    def rows(self, tokens: list[int]) -> dict[str, torch.Tensor]:
        """`hidden_states` after the last norm, and `hidden_states.layer_0`, (tokens, 64) each."""
        key = tuple(tokens)
        if key not in self._known:
            with torch.no_grad():
                out = self._model.model(torch.tensor([tokens]), output_hidden_states=True)
            self._known[key] = {
                "hidden_states": out.last_hidden_state[0],
                "hidden_states.layer_0": out.hidden_states[1][0],
            }
        return self._known[key]


class Tokens:
    """Seeded random token sequences."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def sequence(self, length: int) -> list[int]:
        """`length` token ids."""
        return torch.randint(0, VOCABULARY, (length,), generator=self._generator).tolist()

    def number(self, low: int, high: int) -> int:
        """A whole number from `low` to `high - 1`."""
        return int(torch.randint(low, high, (1,), generator=self._generator))
