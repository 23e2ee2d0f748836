#!/usr/bin/env bash
# gpytorch 1.15.2: an exact process in eval mode whose parameters are changed in place predicts with half of the old ones.
#
# Guess: predictions follow the parameters, as everywhere in torch, or all of the old cache is used. Seen: the factor of
# the training data stays as it was, and the kernel to the new points is computed anew: the prediction is that of no
# parameters at all. load_state_dict and train() clear the cache; copy_() does not.
#
# Why a training loop cares: averages of weights (EMA, SWA) and searches over weights put values in place by copy_()
# around a validation, often with the model in eval mode already.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy gpytorch==1.15.2
env/bin/python -W ignore - <<'END'
import gpytorch
import torch


class Process(gpytorch.models.ExactGP):
    def __init__(self):
        x = torch.linspace(0, 1, 20)
        super().__init__(x, torch.sin(6 * x), gpytorch.likelihoods.GaussianLikelihood())
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


points = torch.tensor([0.33, 0.77])
trained, used = Process().eval(), Process().eval()
with torch.no_grad():
    for parameter in trained.parameters():
        parameter.add_(1.5)
    right = trained(points).mean
    before = used(points).mean.clone()
    for parameter, value in zip(used.parameters(), trained.parameters()):
        parameter.copy_(value)
    copied = used(points).mean.clone()
    used.train()
    used.eval()
    switched = used(points).mean
assert torch.allclose(switched, right) and not torch.allclose(copied, right, atol=0.5), (switched, right, copied)
assert not torch.allclose(copied, before, atol=0.5), (copied, before)
show = lambda values: [round(value, 2) for value in values.tolist()]
print(
    f"gpytorch {gpytorch.__version__}: the copied parameters predict {show(copied)}, where they are {show(right)} and the "
    f"ones before were {show(before)}; after train() and eval() {show(switched)}"
)
END
