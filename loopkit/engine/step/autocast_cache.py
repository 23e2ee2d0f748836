"""AutocastCache: the cast weights that autocast caches within a step, and when they are out of date."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter

import torch
from torch import Tensor, nn

from loopkit.base import devices
from loopkit.base.sharded import part
from loopkit.engine.life.routing import ForwardWrapper
from loopkit.errors import PhaseError

autocast_is_on = torch._C._is_any_autocast_enabled  # one call for all device types
version_of = attrgetter("_version")


class AutocastCache:
    """Clears autocast's cache before a forward, if a parameter has changed since the forward before it.

    The cache is no option to do without: with it a weight that is used twice is cast once, and its gradients are added
    up in the lower precision, which gives other bits. A change shows in the versions of the tensors,
    so a change through ``.data`` is not seen, but for `compare_values`.
    """

    def __init__(self) -> None:
        self._users = 0
        self._routes: dict[nn.Module, ForwardWrapper] = {}
        self._params: dict[str, Tensor] = {}
        self._versions = 0
        self._compares = False
        self._norms: Sequence[Tensor] = ()

    def begin(self, modules: Mapping[str, nn.Module]) -> None:
        """Look before each forward of these modules, until as many calls of `end`."""
        if not self._users:
            self._routes = {module: route for module, route in self._routes.items() if module in modules.values()}
        self._users += 1
        for name, module in modules.items():
            route = self._routes.get(module)
            if route is None or not route.redo(self.before_forward):
                self._routes[module] = ForwardWrapper(module, module, self.before_forward)
            self._params.update((f"{name}.{path}", p) for path, p in module.named_parameters() if not p.is_inference())

    def end(self) -> None:
        """Leave the modules as they were."""
        self._users -= 1
        if not self._users:
            for route in self._routes.values():
                route.undo()
            self._params.clear()

    def before_forward(self) -> None:
        """Clear the cache if a weight has changed since the forward before."""
        if not autocast_is_on():
            return
        versions = sum(map(version_of, self._params.values()))
        if versions != self._versions:  # they only grow: the sum changes with any of them
            self._versions = versions
            self.clear()
        if self._compares:
            self._compare()

    def clear(self) -> None:
        """Forget the cast weights: the next forward casts them anew."""
        torch.clear_autocast_cache()
        self._norms = ()

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Inside, forwards are none of the step's: weights may change between them."""
        before = self._versions, self._compares, self._norms
        self._compares = False
        try:
            yield
        finally:
            self._versions, self._compares, self._norms = before

    # What versions do not tell

    def compare_values(self, compares: bool) -> None:
        """Also compare the norms of the weights, or stop; that waits for the device."""
        self._compares = compares
        self._norms = ()

    def _compare(self) -> None:
        now = torch._foreach_norm([part(p) for p in self._params.values()])
        pairs = zip(self._params, self._norms, now, strict=True) if self._norms else ()
        same = [(name, (before == after) | (before.isnan() & after.isnan())) for name, before, after in pairs]
        changed = [name for name, each in same if not bool(each)]  # host sync: in the first step, if it has several
        if changed:
            raise PhaseError(
                f"{', '.join(changed[:3])} changed through .data between two forwards of one step, under autocast, "
                f"which still uses the weights as it cast them before: change them in place under torch.no_grad(), "
                f"or call torch.clear_autocast_cache() after the change"
            )
        self._norms = now


@contextmanager
def autocast_off() -> Iterator[list[tuple[str, torch.dtype]]]:
    """Switch autocast off; yields the device types and dtypes that it was on for."""
    on = [device for device in devices.types() if torch.is_autocast_enabled(device)]
    ambient = [(device, torch.get_autocast_dtype(device)) for device in on]
    with ExitStack() as stack:
        for device, _ in ambient:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield ambient
