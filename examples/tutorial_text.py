"""Tutorial: text. The text is docs/tutorial-text.md."""

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import DataLoader

from loopkit import Learner, data, metrics, plugins, seed_everything

seed_everything(0)
STATEMENTS = (
    "assert",
    "assignment",
    "break",
    "class",
    "del",
    "for",
    "function",
    "if",
    "import",
    "raise",
    "try",
    "while",
)
TYPES = (
    "bltin-ellipsis-object",
    "typesseq",
    "typesmapping",
    "typesmethods",
    "typesmodules",
    "strings",
    "numbers",
    "types",
)
lines = [
    (line.strip(), kind)
    for kind, names in enumerate([STATEMENTS, TYPES])
    for name in names
    for line in topics.get(name, "").splitlines()
    if len(line.split()) > 4
]
vocabulary = {word: i for i, word in enumerate(sorted({word for line, _ in lines for word in line.split()}), start=1)}
print(f"{len(lines)} lines, {len(vocabulary)} words")

def collate(samples):
    words = [torch.tensor([vocabulary.get(word, 0) for word in line.split()]) for line, _ in samples]
    return nn.utils.rnn.pad_sequence(words, batch_first=True), torch.tensor([kind for _, kind in samples])


order = torch.randperm(len(lines)).tolist()
cut = len(lines) * 4 // 5
training = [lines[i] for i in order[:cut]]
validation = [lines[i] for i in order[cut:]]
train = DataLoader(training, 32, sampler=data.ResumableSampler(training), collate_fn=collate)
val = DataLoader(validation, 256, collate_fn=collate)

model = nn.Sequential(nn.EmbeddingBag(len(vocabulary) + 1, 32, padding_idx=0), nn.Linear(32, 2))
learner = Learner(
    model,
    nn.CrossEntropyLoss(),
    lambda params: torch.optim.AdamW(params, lr=0.01),
    plugins=[plugins.Metrics(metrics.Accuracy(), f1=metrics.F1()), plugins.EarlyStopping("val/loss", patience=2)],
)
result = learner.fit(train, val, epochs=10)
print(result)

print(learner.predict([collate([("the mapping has a key for each item", 1)])]).argmax(1))
