"""Names of torch that are not public; tests/test_private.py lists the versions in which they were seen."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from loopkit_whole_step.handover import NotHandedOver
from loopkit_whole_step.numbers import compute_once
from loopkit_whole_step.pooling import pool_along_batch

KNOWN = ("2.13",)
"""The versions of torch with which the tests were run. Others are used after verification, as these are."""
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
)
"""Where a module keeps its hooks."""
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS[:4])
"""Where torch keeps those on all modules."""
RECURRENT = ("rnn", "lstm", "gru")
"""Words in the names of operations around which inductor gave wrong numbers."""
UNROLLED = ("gru", "rnn_tanh", "rnn_relu")
"""Recurrent functions of torch that are made of others, one for each step of a sequence."""
aten = torch.ops.aten


def trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Record what a function does to tensors, without doing it."""
    with _environment():
        from torch.fx.experimental.proxy_tensor import make_fx

        return make_fx(function, tracing_mode="fake")(*inputs)


@contextmanager
def short_sequences(most: int, refuse: Callable[[str], Exception]) -> Iterator[None]:
    """Inside, recurrent functions, which unroll when they are recorded, take sequences of at most so many steps.

    Args:
        most: Steps of a sequence.
        refuse: Makes an error from a reason.
    """
    from torch import _VF

    plain: Any = _VF

    def bounded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, *given: Any) -> Any:
            length = x.shape[1] if x.ndim == 3 and given[-1] is True else x.shape[0]
            if isinstance(given[-1], bool) and length > most:
                raise refuse(f"a recurrent module has {length} steps to unroll, more than {most}")
            return function(x, *given)

        return call

    own = {name: getattr(plain, name) for name in UNROLLED}
    try:
        for name, function in own.items():
            setattr(plain, name, bounded(function))
        yield
    finally:
        for name in own:
            delattr(plain, name)


@contextmanager
def _environment() -> Iterator[None]:
    """Put back the environment variables, among which torch notes where it keeps what it compiles."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


def depends_on_data(error: Exception) -> bool:
    """Whether a recording failed since Python asked for the value of a tensor."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode))


def meets_a_stranger(error: Exception) -> bool:
    """Whether a recording failed since it met a tensor that is none of its inputs."""
    return isinstance(error, AssertionError) and "convert all Tensors to FakeTensors first" in str(error)


def inductor(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile a graph in this process; its random numbers equal eager's."""
    with _without_deprecations():
        from torch._inductor.compile_fx import compile_fx_inner

    compiled = _compiled(graph, inputs, compile_fx_inner)
    keep_freed_memory()
    # Without what keeps dynamo from it, which nobody compiles around it: a microsecond or two.
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)  # type: ignore[no-any-return]


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Inside, torch does not warn of deprecated functions in its own modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _compiled(graph: fx.GraphModule, inputs: Sequence[Tensor], inner: Callable[..., Any]) -> Any:
    with _without_deprecations(), _environment(), _without_hints():
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        draw_in_memory_order(graph.graph)
        compute_once(graph.graph, memory_of_its_own())
        if not (filled := fills_vectors(graph.graph)):
            pool_along_batch(graph.graph)
        graph.recompile()
        options = {
            "fallback_random": True,
            "layout_optimization": filled,
            "size_asserts": False,  # looks that take longer than small kernels: `Recording.fits` looks
            "cpp_wrapper": all(value.device.type == "cpu" for value in inputs),  # kernels are called from C++
            "cpp_cache_precompile_headers": False,  # more time for one graph than it saves, and 140 MB on the disk
        }
        with config.patch(options):
            return compile_fx(graph, list(inputs), inner_compile=inner)


def library(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> tuple[str, list[Tensor]]:
    """Compile a graph into a shared library that needs no inductor; returns its path, and its constants.

    Raises:
        NotHandedOver: The library does not do all of it.
    """
    from torch._functorch._aot_autograd.schemas import OutputType
    from torch._guards import TracingContext
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    found: list[Any] = []

    def inner(module: fx.GraphModule, given: Sequence[Any], **options: Any) -> Any:
        context: Any = TracingContext.try_get()
        made = compile_fx_inner(module, given, **options)
        found.append((made, len(given), context.fw_metadata))
        return made

    with config.patch({"fx_graph_cache": False, "compile_threads": 1}), _without_autograd_cache():
        _compiled(graph, inputs, inner)
    if len(found) != 1:
        raise NotHandedOver("it is more than one graph")
    ((made, count, about),) = found
    plain = {OutputType.non_alias, OutputType.unsafe_view_alias}
    if count != len(inputs) or about.num_mutated_inp_runtime_indices:
        raise NotHandedOver("its inputs differ from its library's")
    if any(each.output_type not in plain for each in about.output_info):
        raise NotHandedOver("it returns a view of its argument")
    call = made.current_callable
    held = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))
    if list(held) != ["f"] or "item" in call.__code__.co_names:
        raise NotHandedOver("it is called in an unknown way")
    return held["f"].cell_contents.__self__.__file__, list((made.constants or {}).values())


@contextmanager
def _without_autograd_cache() -> Iterator[None]:
    from torch._functorch import config

    with config.patch({"enable_autograd_cache": False}):
        yield


def load_library(path: Path, constants: Sequence[Tensor]) -> Callable[..., Any]:
    """A library's function, of the inputs of its graph."""
    with _environment():
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
            torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
        )
        spec = importlib.util.spec_from_file_location("inductor_entry_cpp", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    entry = module.inductor_entry_cpp
    give, take = (
        torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors,
        torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs,
    )
    more = list(constants)
    keep_freed_memory()

    def call(*inputs: Tensor) -> Any:
        return take(entry(give([*inputs, *more])))

    return call


def settings() -> dict[str, Any]:
    """The settings of this process that decide how a graph is compiled.

    Raises:
        NotHandedOver: An option of inductor's is more than a plain value.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    options = {} if config is None else {name: each.user_override.get() for name, each in config._config.items()}
    changed = {name: value for name, value in options.items() if type(value) in (bool, int, float, str)}
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "onednn": torch.backends.mkldnn.enabled,
        "options": sorted(changed.items()),
    }


@contextmanager
def as_in(settings: dict[str, Any]) -> Iterator[None]:
    """Inside, graphs are compiled as in the process of these settings."""
    from torch._inductor import config

    torch.set_num_threads(settings["threads"])
    torch.use_deterministic_algorithms(settings["deterministic"])
    torch.set_float32_matmul_precision(settings["precision"])
    torch.backends.mkldnn.enabled = settings["onednn"]
    with config.patch(dict(settings["options"])):
        yield


class VectorUnits:
    """The vector units that the compiler can build for, kept in a file.

    A unit of which that is not known is taken to work: a graph that the compiler builds for it is the proof. Only if
    that fails, each unit is tried.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.assumed, self._tries = path, list[str](), False
        try:
            self._known: dict[str, bool] = json.loads(path.read_text())
        except (OSError, ValueError):
            self._known = {}

    @contextmanager
    def looked_up(self) -> Iterator[None]:
        """Inside, the compiler's choice goes by what is known, and units after the first one that works are left."""
        from torch._inductor import cpu_vec_isa

        tried, listed = cpu_vec_isa.VecISA.check_build, cpu_vec_isa.supported_vec_isa_list

        def check_build(unit: Any, code: str) -> bool:
            tools = cpu_vec_isa._get_isa_dry_compile_fingerprint(unit.build_arch_flags())
            about = f"{tools} {code} {platform.node()}"
            name = f"{unit}: {hashlib.sha256(about.encode()).hexdigest()}"
            if name in self._known:
                return self._known[name]
            if not self._tries:
                self.assumed.append(name)
                return True
            self._keep({name: tried(unit, code)})
            return self._known[name]

        cpu_vec_isa.VecISA.check_build = check_build  # type: ignore[method-assign, assignment]
        if os.environ.get("ATEN_CPU_CAPABILITY") is None:
            cpu_vec_isa.supported_vec_isa_list = _First(listed)
        try:
            yield
        finally:
            cpu_vec_isa.VecISA.check_build = tried  # type: ignore[method-assign]
            cpu_vec_isa.supported_vec_isa_list = listed

    def proved(self) -> None:
        """Keep what was taken to work: a graph was built for it."""
        if self.assumed:
            self._keep(dict.fromkeys(self.assumed, True))
        self.assumed = []

    def disproved(self) -> bool:
        """Try each unit from now on; returns whether one was only taken to work."""
        from torch._inductor import cpu_vec_isa

        if not self.assumed:
            return False
        self.assumed, self._tries = [], True
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        for unit in list.__iter__(cpu_vec_isa.supported_vec_isa_list):
            for kind in type(unit).__mro__:
                for value in vars(kind).values():
                    if hasattr(value, "cache_clear"):
                        value.cache_clear()
            vars(unit).update({name: False for name in vars(unit) if name.startswith("_is_")})
        return True

    def _keep(self, more: dict[str, bool]) -> None:
        self._known.update(more)
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        new.write_text(json.dumps(self._known))
        os.replace(new, self.path)


class _First(list[Any]):
    """A list that ends after the first unit that the compiler can build for and the processor has."""

    def __iter__(self) -> Iterator[Any]:
        from torch._inductor import cpu_vec_isa

        has = cpu_vec_isa.x86_isa_checker()
        for unit in super().__iter__():
            yield unit
            if all(flag in has for flag in str(unit).split()) and unit:
                return


def memory_of_its_own() -> Any:
    """The copy of a tensor that inductor puts into memory, and neither into a loop that reads it nor aside.

    A view in its place, such as ``as_strided``, is one of whatever its input turns out to be a view of.
    """
    import torch._inductor.test_operators  # which defines it

    return torch.ops._inductor_test.realize.default


@contextmanager
def _without_hints() -> Iterator[None]:
    """Inside, inductor does not name the operations that it calls in a slower way: each graph is timed."""
    log = logging.getLogger("torch._inductor.ir")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def keep_freed_memory() -> None:
    """Let the C library keep memory for the next step; the memory freed at a graph's end would be mapped again in each.

    GNU's C library keeps twice as much as the largest block that was ever freed, but for blocks from 32 MiB on.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def draw_in_memory_order(graph: fx.Graph) -> None:
    """Make each operation that draws numbers for a transposed tensor draw them for the tensor as it lies in memory.

    Eager draws in the order of memory. Inductor makes the tensor anew in the order of its dimensions.
    """
    for node in list(graph.nodes):
        given = node.args[0] if node.args else None
        if not is_seeded(node) or not isinstance(given, fx.Node):
            continue
        value, made = given.meta["val"], node.meta["val"]
        order = sorted(range(value.ndim), key=lambda at: -value.stride(at))
        if not isinstance(made, Tensor) or made.shape != value.shape or order == sorted(order):
            continue
        with graph.inserting_before(node):
            turned = graph.call_function(aten.permute.default, (given, order))
            turned.meta["val"] = value.permute(order)
        with graph.inserting_after(node):
            back = graph.call_function(aten.permute.default, (node, [order.index(at) for at in range(value.ndim)]))
            back.meta = dict(node.meta)
        node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
        node.args = (turned, *node.args[1:])
        node.meta["val"] = made.permute(order)


def fills_vectors(graph: fx.Graph) -> bool:
    """Whether what each convolution makes has one channel, or a multiple of eight.

    On the CPU inductor lets convolutions work in channels_last. Of six channels, say, each loop around one, such as a
    pooling's, is then not vectorised, and takes longer than the convolution gains.
    """
    made = [node.meta["val"].shape[1] for node in graph.nodes if node.target is aten.convolution.default]
    return not any(channels > 1 and channels % 8 for channels in made)


def step_of(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer's own step, without the hooks on it, in the form that can be recorded."""
    step = type(optimizer).step
    with _compiling():
        getattr(step, "__wrapped__", step)(optimizer)


@contextmanager
def _compiling() -> Iterator[None]:
    """Inside, optimizers take ``capturable`` on every device."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def hooks_of(module: torch.nn.Module) -> list[dict[int, Any]]:
    """The dicts in which a module keeps its hooks."""
    return [vars(module)[name] for name in HOOKS if name in vars(module)]


def have_hooks(tensors: Sequence[Tensor]) -> bool:
    """Whether one of these tensors has hooks, beside the engine's own."""
    hooked = [each for each in tensors if each._backward_hooks or each._post_accumulate_grad_hooks]
    return any(each._backward_hooks or _given(each._post_accumulate_grad_hooks.values()) for each in hooked)


def global_hooks() -> int:
    """How many hooks are on all modules."""
    from torch.nn.modules import module

    return sum(len(vars(module)[name]) for name in GLOBAL_HOOKS)


def step_hooks(optimizer: torch.optim.Optimizer) -> int:
    """How many hooks are on an optimizer's step, without the engine's own."""
    return len(_given([*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]))


def _given(hooks: Iterable[Any]) -> list[Any]:
    """The hooks that are not the engine's own."""
    return [
        each
        for each in hooks
        if not getattr(getattr(each, "func", each), "__module__", "").startswith("loopkit.engine")
    ]


def list_weights(module: torch.nn.RNNBase) -> None:
    """Let a recurrent module make the list of its weights anew, as it does in a call in which they are others."""
    with torch.no_grad():
        module._init_flat_weights()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of a module are compiled already."""
    return module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule)


def multiply(graph: fx.Graph) -> list[str]:
    """Make products of ``add(x, y, alpha=value)`` whose value is a tensor's; returns what else is read of a tensor."""
    reads = [node for node in graph.nodes if node.target is aten._local_scalar_dense.default]
    for read in reads:
        (source,) = read.args
        for user in list(read.users):
            if user.target in (aten.add_.Tensor, aten.add.Tensor) and user.kwargs.get("alpha") is read:
                with graph.inserting_before(user):
                    product = graph.call_function(aten.mul.Tensor, (user.args[1], source))
                user.args = (user.args[0], product)
                user.kwargs = {}
        if not read.users:
            graph.erase_node(read)
    return [node.name for node in graph.nodes if node.target is aten._local_scalar_dense.default]


def recurrent(graph: fx.Graph) -> str:
    """The first recurrent operation of a graph; empty if there is none."""
    names = (str(node.target) for node in graph.nodes if node.op == "call_function")
    return next((name for name in names if any(word in name for word in RECURRENT)), "")


def draws(graph: fx.Graph) -> bool:
    """Whether a graph takes random numbers."""
    return any(map(is_seeded, graph.nodes))


def is_seeded(node: fx.Node) -> bool:
    """Whether an operation takes random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
