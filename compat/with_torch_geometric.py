"""torch_geometric: graph networks over batches of graphs, from its own loader."""

from __future__ import annotations

from typing import Any

import torch
from checks import Program, main
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

NEEDS = ["torch_geometric==2.8.1"]


class Graphs(nn.Module):
    """Two convolutions and a mean over the nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = GCNConv(5, 8), GCNConv(8, 8)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, batch: Any) -> Tensor:
        nodes = self.two(self.one(batch.x, batch.edge_index).relu(), batch.edge_index)
        return self.head(self.drop(global_mean_pool(nodes, batch.batch)))


def graphs(count: int, seed: int) -> list[Data]:
    """Rings of 3 to 5 nodes."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        nodes = torch.arange(3 + index % 3)
        edges = torch.stack([nodes, nodes.roll(1)])
        features = torch.randn(len(nodes), 5, generator=generator)
        made.append(Data(x=features, edge_index=edges, y=torch.randn(1, 2, generator=generator)))
    return made


class GraphRegression(Program):
    def model(self) -> nn.Module:
        return Graphs()

    def train(self) -> Any:
        return DataLoader(graphs(27, 2), batch_size=4, shuffle=True)

    def val(self) -> Any:
        return DataLoader(graphs(6, 9), batch_size=4)

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        return batch, batch.y

    def samples(self, batch: Any) -> int:
        return batch.num_graphs


if __name__ == "__main__":
    main(NEEDS, [GraphRegression()])
