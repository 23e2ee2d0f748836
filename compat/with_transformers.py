"""transformers: models that return their loss, and its Adafactor, which has no rate of its own."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from checks import Program, main
from torch import Tensor, nn

NEEDS = ["transformers==5.24.0"]


def sentences(sizes: tuple[int, ...], seed: int) -> list[dict[str, Tensor]]:
    """Batches of random words."""
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(50, (size, 8), generator=generator) for size in sizes]
    return [{"input_ids": each, "labels": each} for each in words]


class Gpt2(Program):
    def model(self) -> nn.Module:
        config = transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2)
        return transformers.GPT2LMHeadModel(config)

    def train(self) -> Any:
        return sentences((4, 4, 4, 4, 4, 4, 3), 2)

    def val(self) -> Any:
        return sentences((4, 2), 9)

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        return batch, batch["labels"]

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(**inputs)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return outputs.loss

    def samples(self, batch: Any) -> int:
        return len(batch["labels"])


class Bert(Gpt2):
    def model(self) -> nn.Module:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, **sizes))


class Adafactor(Gpt2):
    def optimizer(self, model: nn.Module) -> Any:
        return transformers.Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True)


if __name__ == "__main__":
    main(NEEDS, [Gpt2(), Bert(), Adafactor()])
