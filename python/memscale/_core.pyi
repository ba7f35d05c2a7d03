# SPDX-License-Identifier: Apache-2.0
"""The C core of MemScale: memory graphs, replay, and the decision.

This is the extension module that everything else in the package stands on. It knows neither PyTorch nor
devices: it works on numbers. The C headers in ``include/memscale`` define every term used here.

Conventions:
    Sizes are bytes, times are integer nanoseconds. Ids count from 0 in the order of addition; "no such id"
    is -1. A *position* ``t`` is the gap right before operation ``t``.

Errors:
    Failures of the core raise by kind: wrong or malformed data `ValueError`, host memory `MemoryError`,
    calls in the wrong order `RuntimeError`, files `OSError`, memory of a device that is there
    `torch.OutOfMemoryError`, and everything else `memscale.errors.MemScaleError`. Each such exception has an
    attribute ``status`` with the name of the C status code, such as ``"EFORMAT"``. Arguments of a wrong type
    raise `TypeError`.

Threads:
    Every object has its own memory, so distinct objects are independent. A finished `Graph` and every
    `Plan` are immutable and may be shared.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from os import PathLike
from typing import Any, Final, Literal, SupportsIndex, TypeAlias, TypedDict, final

PHASE_FORWARD: Final = 0
PHASE_BACKWARD: Final = 1
PHASE_OPTIMIZER: Final = 2

CATEGORY_PARAMETER: Final = 0
CATEGORY_BUFFER: Final = 1
CATEGORY_GRADIENT: Final = 2
CATEGORY_OPTIMIZER_STATE: Final = 3
CATEGORY_INPUT: Final = 4
CATEGORY_ACTIVATION: Final = 5
CATEGORY_TEMPORARY: Final = 6
CATEGORY_WORKSPACE: Final = 7
REPLAY_STEPS: Final = 2
CATEGORY_NAMES: Final[tuple[str, ...]]
"""Lower-case names, indexed by ``CATEGORY_…``: ``"parameter"``, ``"buffer"``, ``"gradient"`` and so on."""

OP_RANDOM: Final = 1
"""Operation flag: draws random numbers."""
OP_HALF: Final = 2
"""Operation flag: works on half precision, BF16, FP16 or less."""

WORK_OTHER: Final = 0
"""Class of work: none of the others, or unknown."""
WORK_MOVE: Final = 1
"""Class of work: element by element, waits for memory: copies, sums, ReLU."""
WORK_MATH: Final = 2
"""Class of work: element by element, with a function in it: exp, GELU, sigmoid."""
WORK_SLOW_MATH: Final = 3
"""Class of work: the same, with a function that takes longer: tanh, power."""
WORK_REDUCE: Final = 4
"""Class of work: over the innermost dimension: softmax, layer norm, sums."""
WORK_CHANNEL: Final = 5
"""Class of work: statistics of channels: batch norm, variance."""
WORK_SELECT: Final = 6
"""Class of work: by a mask, or in another order: where, copies that transpose."""
WORK_WINDOW: Final = 7
"""Class of work: pooling, interpolation."""
WORK_RANDOM: Final = 8
"""Class of work: draws a random number per element."""
WORK_GATHER: Final = 9
"""Class of work: rows by index: embedding, scatter."""
WORK_MATRIX: Final = 10
"""Class of work: matrix products."""
WORK_BATCH: Final = 11
"""Class of work: many small matrix products at once."""
WORK_ATTENTION: Final = 12
"""Class of work: scaled dot-product attention in one kernel."""
WORK_CONVOLUTION: Final = 13
"""Class of work: dense convolutions."""
WORK_GROUPED: Final = 14
"""Class of work: convolutions of each channel, or few, by itself."""
WORK_GROUPED_GRADIENT: Final = 15
"""Class of work: gradients of such."""
WORK_RECURRENT: Final = 16
"""Class of work: recurrent layers in one kernel."""
WORK_COUNT: Final = 17
OPTIM_STATE_VERSION: Final = 1
"""Of the arrays of `Optim`."""
RATE_NAMES: Final[tuple[str, ...]]
"""Kinds of rates: the classes of work by ``WORK_…``, then the same with ``"_half"`` at the end."""

MODULE_ROOT: Final = 1
"""Module flag: the whole model."""
MODULE_PYTHON_STATE: Final = 2
"""Module flag: its forward changed an attribute that is not a buffer."""
MODULE_NO_FORWARD: Final = 4
"""Module flag: not called through its own forward in a usual way."""
MODULE_NOT_TENSORS: Final = 8
"""Module flag: fills an object that is not a tensor, such as a cache."""
MODULE_EXCLUDED: Final = 16
"""Module flag: the caller forbids it: neither it nor a module around it is recomputed or offloaded."""
MODULE_HOOKED: Final = 32
"""Module flag: a module below it has forward hooks, which a recompute would fire again."""
MODULE_CHAIN: Final = 64
"""Module flag: its forward calls its children one after another, each on the result of the one before."""
MODULE_NO_ROOM: Final = 128
"""Module flag: a recompute needs more streamed weights at once than there is room for."""
MODULE_INPUT_CHANGED: Final = 256
"""Module flag: a buffer that it reads, and does not change itself, is changed after it ran."""
MODULE_LEFT_OUT: Final = 512
"""Module flag: the caller wants no technique applied to it; modules around it may be recomputed."""
MODULE_DIFFERED: Final = 1024
MODULE_SCRIPTED: Final = 2048
"""Module flag: a recompute of it was seen to differ from its forward."""

class _SimOptions(TypedDict, total=False):
    """The allocator that the step will run on; what is left out has the default of the kind."""

    kind: Literal["host", "cuda"]
    alloc_conf: str | None  # text of PYTORCH_ALLOC_CONF; read first, the other fields override it
    capacity_bytes: int | None
    device_total_bytes: int | None
    allowed_bytes: int | None
    max_split_bytes: int | None
    max_non_split_rounding_bytes: int
    large_segment_bytes: int
    roundup_power2_divisions: int
    expandable_segments: bool

class _Rates(TypedDict, total=False):
    """Rates of the machine that the step will run on, all above 0; what is left out has its default.

    ``flops_per_us`` and ``moved_bytes_per_us``: one number for all kinds of rate, or a dict by `RATE_NAMES`.
    """

    flops_per_us: int | dict[str, int]
    moved_bytes_per_us: int | dict[str, int]
    fresh_from_bytes: int  # buffers and scratch of this size and above come from the system each time
    fresh_bytes_per_us: int  # at this rate
    launch_ns: int  # of one operation
    recompute_ns: int  # of one checkpointed call
    intercept_ns: int  # of one operation inside a selective checkpoint

class _Offload(TypedDict, total=False):
    """How tensors may leave the device: the fields of ``msc_link``; what is left out has its default."""

    out_bytes_per_us: int  # above 0
    in_bytes_per_us: int  # above 0
    offload_ns: int  # of one copy
    least_bytes: int  # of a storage that is moved, above 0
    limit_bytes: int | None  # most bytes off the device at once; None: no limit
    window_out_bytes: int  # of one call, most that wait on the device for their copy out
    window_in_bytes: int  # of one call, most that come back ahead of their use
    staging_bytes: int  # of the device, held by a plan that moves anything; 0 for a card

class _Summary(TypedDict):
    """A plan as a whole: the fields of ``msc_plan_summary``."""

    budget_bytes: int
    plain_peak_bytes: int
    peak_bytes: int
    smallest_peak_bytes: int
    plain_step_ns: int
    step_ns: int
    time_bound_ppm: int
    peak_op: int
    peak_in_recompute: bool
    fits: bool
    graph_digest: str
    window_out_bytes: int
    window_in_bytes: int
    away_peak_bytes: int
    staging_bytes: int

_Choice: TypeAlias = tuple[
    int, str, str, int, int, int, int, int, bool, tuple[int, ...], bool, int, int, int, tuple[int, ...], int
]
"""A choice of a plan: the fields of ``msc_choice``, and what `msc_plan_kept` and `msc_plan_moved` give.

``(module, action, rule, call_count, saved_bytes, cost_ns, other_peak_bytes, other_step_ns, joined,
kept_offsets, boundary, moved_bytes, moved_count, transfer_ns, moved_ordinals, ahead_bytes)``. ``action`` is
``"keep"``, ``"checkpoint"``, ``"selective"`` or ``"offload"``; ``rule`` is a key for `rule_text`. A kept
offset counts operations from the begin of the module's call, a moved ordinal what is saved in it, or for a
``boundary`` its inputs.
"""

_Rule: TypeAlias = dict[str, Any]
"""What `Optim` is to do, by name."""

_Span: TypeAlias = tuple[int, int]
"""An array: address and bytes."""

class _Stats(TypedDict):
    """Statistics of a simulator, named as in ``torch.cuda.memory_stats``."""

    allocated_now_bytes: int
    allocated_peak_bytes: int
    reserved_now_bytes: int
    reserved_peak_bytes: int
    requested_now_bytes: int
    requested_peak_bytes: int
    inactive_split_now_bytes: int
    segment_now_count: int
    segment_peak_count: int
    device_alloc_count: int
    device_free_count: int
    alloc_retry_count: int
    oom_count: int

class _Replay(TypedDict):
    """What `replay` returns; `peak_event` is an index into the events that `step_events` gives."""

    peak_bytes: int
    peak_event: int
    peak_op: int
    peak_in_recompute: bool
    stats: _Stats
    category_peak_bytes: dict[str, int]
    peak_live: list[tuple[int, int, int, int, int, bool]]
    live: bytes
    ops: bytes
    recompute: bytes
    event_count: int
    away_peak_bytes: int
    moved_bytes: int
    moved_count: int

class _StepEvents(TypedDict):
    """What `step_events` returns: columns of native numbers.

    Events, in order: ``kind`` (uint8: 0 allocation, 1 free, 2 an operation starts, 3 the same inside a
    recompute, 4 an instance's copy out of the device begins, 5 that copy is needed no longer), ``category``
    (uint8: ``CATEGORY_…``, 0 for operations), ``id`` (uint32: index of the operation, otherwise instance),
    ``size`` (uint64: bytes, 0 for operations).

    Instances, indexed by an event's ``id``: ``instance_buffer`` (uint32: buffer of the graph, 2^32 - 1 for
    what an operation needs inside and for state of a checkpointed call), ``instance_op`` (uint32: operation
    that made it, number of operations for what was there before the step), ``instance_appears`` (uint32: of
    what was there before, the operation with which it appears in the first step of a run, 2^32 - 1 for what
    is there from the start; optimizer state before that operation's results, others after them),
    ``instance_recomputed`` (uint8), ``instance_returned`` (uint8: 1 for the copy of one that had left the
    device).
    """

    kind: bytes
    category: bytes
    id: bytes
    size: bytes
    instance_buffer: bytes
    instance_op: bytes
    instance_appears: bytes
    instance_recomputed: bytes
    instance_returned: bytes

@final
class Graph:
    """The memory graph of one training step: operations, buffers, saved tensors, modules and their calls.

    A graph is built by adding records in program order, then `finish` validates and freezes it.

    Example:
        >>> graph = Graph()
        >>> weight = graph.add_resident(4096, CATEGORY_PARAMETER)
        >>> op = graph.add_op("aten::mm", flops=2048, moved_bytes=8192)
        >>> out = graph.add_buffer(1024, CATEGORY_TEMPORARY)
        >>> graph.end_buffer(out)
        >>> graph.finish()
    """

    def __new__(cls) -> Graph: ...

    # building, in program order

    def add_module(
        self,
        path: str,
        type: str,
        parent: SupportsIndex = -1,
        flags: SupportsIndex = 0,
        structure: SupportsIndex = 0,
        state_bytes: SupportsIndex = 0,
    ) -> int:
        """Adds a module; its parent must have been added before.

        Args:
            path: Qualified name, ``""`` for the root.
            type: Name of the class.
            parent: Id of the nearest enclosing module, or -1.
            flags: ``MODULE_…`` combined.
            structure: Equal for modules of equal structure; 0: unknown, equal to nothing.
            state_bytes: What a second execution needs beside inputs, such as random state; twice in it.

        Returns:
            The id of the module.

        Raises:
            ValueError: An unknown parent, or a name that is too long or has control characters.
            RuntimeError: The graph is finished.
        """

    def mark_module(
        self, module: SupportsIndex, flags: SupportsIndex, state_bytes: SupportsIndex = 0
    ) -> None:
        """Adds flags and state bytes to a module."""

    def set_phase(self, phase: SupportsIndex) -> None:
        """Sets the phase of the operations to come; phases never go back."""

    def begin_call(self, module: SupportsIndex) -> int:
        """Enters a call of ``module`` at the present position and returns the id of the call."""

    def end_call(self, call: SupportsIndex) -> None:
        """Leaves the innermost open call, which must be ``call``."""

    def add_input(self, call: SupportsIndex, buffer: SupportsIndex) -> None:
        """Says that ``buffer`` is an argument of the open call ``call``; duplicates are ignored."""

    def add_op(
        self,
        name: str,
        flops: SupportsIndex,
        moved_bytes: SupportsIndex,
        scratch_bytes: SupportsIndex = 0,
        flags: SupportsIndex = 0,
        work: SupportsIndex = 0,
    ) -> int:
        """Adds an operation inside the innermost open call and in the present phase.

        Args:
            name: Name of the operator.
            flops: Floating-point operations.
            moved_bytes: Bytes read plus bytes written.
            scratch_bytes: Allocated and freed inside the kernel, beyond its outputs.
            flags: ``OP_…`` combined.
            work: ``WORK_…``.

        Returns:
            The id of the operation.

        Raises:
            ValueError: A name with control characters, or a number out of range.
            RuntimeError: The graph is finished.
        """

    def add_buffer(self, size_bytes: SupportsIndex, category: SupportsIndex) -> int:
        """Adds a buffer made by the operation added last, or resident before the first; returns its id."""

    def add_resident(self, size_bytes: SupportsIndex, category: SupportsIndex) -> int:
        """Adds a buffer that is alive before the step, at any time; returns its id."""

    def add_late(self, size_bytes: SupportsIndex, category: SupportsIndex) -> int:
        """Adds a buffer that only later steps of a run find before they begin; returns its id.

        In the first step it appears with the operation added last, and stays: a library's workspace, say.
        """

    def make_late(self, buffer: SupportsIndex) -> None:
        """Says that a resident buffer appears with the operation to come, before its results.

        That is state which an optimizer makes when it steps for the first time.
        """

    def note_op(self, module: SupportsIndex, source: str) -> None:
        """Puts a note on the operation added last.

        Args:
            module: Id of the module that it works for, where that is not the one of its call; or -1.
            source: The line that runs it, such as "package/file.py:123", or "".
        """

    def note_buffer(self, buffer: SupportsIndex, module: SupportsIndex, what: str) -> None:
        """Puts a note on a buffer; it replaces an earlier one.

        Args:
            buffer: Id of the buffer.
            module: Id of the module that it belongs to, where that is not the one of what made it; or -1.
            what: Such as "float32[4, 512] h.0.ln_1.weight".
        """

    def set_category(self, buffer: SupportsIndex, category: SupportsIndex) -> None:
        """Sets the category of a buffer, e.g. once it is known to be a gradient."""

    def set_size(self, buffer: SupportsIndex, size_bytes: SupportsIndex) -> None:
        """Sets the size of a buffer that is known later: of memory for this and what comes next, say."""

    def end_buffer(self, buffer: SupportsIndex) -> None:
        """Ends a buffer at the present position: no reference is left but those of saved tensors."""

    def add_write(self, buffer: SupportsIndex) -> None:
        """Notes an in-place change of ``buffer`` by the operation added last."""

    def add_save(self, buffer: SupportsIndex) -> int:
        """Packs a saved tensor at the present position; returns its id."""

    def unpack(self, save: SupportsIndex) -> None:
        """Notes the first use of a save in backward; later uses change nothing."""

    def release(self, save: SupportsIndex) -> None:
        """Notes that autograd dropped a save."""

    def finish(self) -> None:
        """Closes what is open, validates the whole and freezes the graph.

        Raises:
            ValueError: The records contradict each other (status ``EFORMAT``).
            RuntimeError: The graph is finished already.
        """

    # text

    def save(self, path: str | bytes | PathLike[str] | PathLike[bytes]) -> None:
        """Writes the canonical text of a finished graph to a file, all or nothing.

        Raises:
            RuntimeError: The graph is open.
            OSError: The file cannot be written.
        """

    @classmethod
    def load(cls, path: str | bytes | PathLike[str] | PathLike[bytes]) -> Graph:
        """Reads a finished graph from a file.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is no graph (``EFORMAT``, the message names the line) or of a newer version
                (``EVERSION``).
        """

    @classmethod
    def parse(cls, text: str | bytes) -> Graph:
        """Reads a finished graph from canonical text.

        Raises:
            ValueError: As `load`.
        """

    def to_text(self) -> str:
        """The canonical text of a finished graph; bytes that are not UTF-8 appear as surrogates."""

    # reading

    @property
    def op_count(self) -> int:
        """Number of operations."""
    @property
    def buffer_count(self) -> int:
        """Number of buffers."""
    @property
    def save_count(self) -> int:
        """Number of saved tensors."""
    @property
    def module_count(self) -> int:
        """Number of modules."""
    @property
    def call_count(self) -> int:
        """Number of calls."""
    @property
    def finished(self) -> bool:
        """Whether `finish` has been called."""
    @property
    def digest(self) -> str:
        """Digest of the canonical text, 16 hexadecimal digits; all zeros while the graph is open."""

    def ops(self) -> list[tuple[str, int, int, int, int, int, int, int]]:
        """``(name, call, phase, flags, flops, moved_bytes, scratch_bytes, work)`` per operation."""

    def buffers(self) -> list[tuple[int, int, int, int, bool]]:
        """``(size_bytes, begin, end, category, resident)`` per buffer; ``end`` is the natural end."""

    def saves(self) -> list[tuple[int, int, int, int, int]]:
        """``(buffer, call, pack, unpack, release)`` per save."""

    def modules(self) -> list[tuple[str, str, int, int, int, int]]:
        """``(path, type, parent, flags, structure, state_bytes)`` per module."""

    def op_notes(self) -> list[tuple[int, int, str]]:
        """(op, module, source) per note on an operation; module -1 for none."""

    def buffer_notes(self) -> list[tuple[int, int, str]]:
        """(buffer, module, what) per note on a buffer; module -1 for none."""

    def calls(self) -> list[tuple[int, int, int, int]]:
        """``(module, parent, begin, end)`` per call: operations ``begin … end-1``."""

@final
class Plan:
    """What shall be done with each module, and what that is expected to bring. Immutable.

    Made by `decide`, `Plan.parse` or `Plan.build`.
    """

    @classmethod
    def build(
        cls,
        choices: Iterable[Sequence[object]],
        summary: _Summary | dict[str, Any] | None,
    ) -> Plan:
        """Makes a plan from its parts.

        Args:
            choices: As `choices` returns them, or only the first 6 or 10 elements of each (the others are
                then zero and empty); module ids must rise.
            summary: As `summary` returns it, a dict; fields that are left out are 0.

        Raises:
            ValueError: An unknown action, rule or field, module ids, kept offsets or moved ordinals that do
                not rise, kept offsets where the action is not ``"selective"``, or moves where nothing is
                offloaded.
        """

    @classmethod
    def parse(cls, text: str | bytes) -> Plan:
        """Reads a plan from canonical text.

        Raises:
            ValueError: Malformed (``EFORMAT``, the message names the line) or of another version
                (``EVERSION``).
        """

    def to_text(self) -> str:
        """The canonical text."""

    @property
    def choices(self) -> list[_Choice]:
        """What is done with each module that was considered, in module order."""
    @property
    def summary(self) -> _Summary:
        """The plan as a whole."""
    @property
    def digest(self) -> str:
        """Digest of the canonical text, 16 hexadecimal digits; equal exactly for equal plans."""

class _Block(TypedDict):
    """One block, as in ``torch.cuda.memory_snapshot``, and the id that holds it."""

    address: int
    size: int
    requested_size: int
    state: Literal["active_allocated", "active_pending_free", "inactive"]
    id: int

class _Segment(TypedDict):
    """One segment, as in ``torch.cuda.memory_snapshot``."""

    address: int
    total_size: int
    allocated_size: int
    active_size: int
    requested_size: int
    stream: int
    pool: int
    segment_type: Literal["small", "large"]
    is_expandable: bool
    blocks: list[_Block]

class _SegmentEvent(TypedDict):
    """One segment event, as in the trace of a snapshot, and the index of the call that caused it."""

    action: Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]
    addr: int
    size: int
    stream: int
    pool: int
    segment_type: Literal["small", "large"]
    call: int

@final
class Saved:
    """What autograd holds in place of a tensor that it saved; `OffloadEngine.unpack` gives the tensor."""

    @property
    def left(self) -> bool:
        """Whether the tensor left the device, or is on its way."""

    def guard(self, function: object, /) -> None:
        """Has a function called before each unpack; what it raises ends the unpack."""

@final
class Block:
    """One tensor's bytes in an engine, for those who say themselves when they leave and come back.

    `OffloadEngine.put` makes it. It holds the tensor that it was made of until it is settled, and the one
    that it is fetched into until that has arrived. Neither is written meanwhile, nor is the latter read.
    When the engine is closed its blocks are dropped. All methods but `drop` raise `RuntimeError` on a
    dropped one, and release the GIL while they wait.

    Example:
        >>> block = engine.put(tensor)
        >>> block.settle()
        >>> block.get(torch.empty_like(tensor))
        >>> block.arrive()
        >>> block.drop()
    """

    @property
    def nbytes(self) -> int:
        """Bytes that were put."""

    def settle(self) -> None:
        """Waits until the bytes are in their tier.

        Raises:
            OSError: The copy failed: the tensor is all there is, and the block only good for `drop`.
            MemScaleError: Likewise, on a card.
            KeyboardInterrupt: Or whatever a signal's handler raised meanwhile; the rest is as without. So
                does `arrive`.
        """

    def settled(self) -> bool:
        """Whether they are there, without waiting. Raises as `settle`."""

    def get(self, tensor: Any, /) -> None:
        """Starts the copy back into a tensor of as many bytes. Autograd is not told that it is written.

        Raises:
            ValueError: It has no dense memory on the device, or not as many bytes.
            RuntimeError: What an earlier `get` asked for has not arrived, or the copy out failed.
        """

    def arrive(self) -> None:
        """Waits until the latest `get` is done. It may be got again afterwards.

        Raises:
            OSError: It could not be read: the bytes of the tensor are anything.
            RuntimeError: Nothing was asked for.
        """

    def drop(self) -> None:
        """Ends the block and makes its place free. What is under way is waited for. Again: nothing."""

@final
class OffloadEngine:
    """Saved tensors leave the device in forward and come back for backward: a pair of hooks for autograd.

    Args:
        tensor_type: ``torch.Tensor``.
        parameter_type: ``torch.nn.Parameter``.
        directory: Folder of the file tier; None: the system's for temporary files.
        options: By name: ``pinned_bytes``, ``host_bytes``, ``file_bytes`` (limits; 0: not used),
            ``chunk_bytes``, ``staging_count``, ``prefetch_count``, ``prefetch_bytes``, ``trace_count``,
            ``debug``, ``cuda``, ``ordinal``, ``least_bytes`` (smaller storages stay), ``window_bytes``
            (sources that wait for their copy), ``no_library`` (no function of PyTorch is called by its C++
            name); ``fault_...``: fault injection on the host;
            ``fault_capsules`` and ``fault_no_library`` read and make tensors as on other versions of
            PyTorch.

    Raises:
        ValueError: An unknown option, or one out of range, named in the message.
        OSError: The directory cannot hold the file.
        AttributeError: ``tensor_type`` is not PyTorch's.
        MemScaleError: No such card, or its driver refuses (status ``ENODEV``, ``EDRIVER``).

    Example:
        >>> engine = OffloadEngine(torch.Tensor, torch.nn.Parameter, None, {"host_bytes": 1 << 30})
        >>> with torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack):
        ...     loss = model(batch).sum()
        >>> loss.backward()
    """

    def __new__(
        cls, tensor_type: type, parameter_type: type, directory: str | None = None, options: Any = None
    ) -> OffloadEngine: ...
    def pack(self, tensor: Any, /) -> Saved:
        """Starts the copy of the tensor's storage, if it is one that leaves.

        Raises:
            ValueError: The engine is closed.
            MemScaleError: A copy could not be submitted.
        """

    def unpack(self, saved: Saved, /) -> Any:
        """The tensor, on the device, with its dtype, sizes and strides.

        Raises:
            RuntimeError: It was changed in place before its copy was complete, or in debug mode at any time;
                or the engine is closed.
            OSError: It could not be read back.
            torch.OutOfMemoryError: There is no room for it on the device.
            MemScaleError: Its copy failed.
        """

    def put(self, tensor: Any, /) -> Block | None:
        """Starts to copy a tensor's bytes out; None, and nothing has happened, where no tier has room.

        Its elements have to lie one after the other, in whatever order of dimensions; it may be a part of a
        storage, and of those around it nothing is read. Call `step` now and then: the engine keeps a list of
        what was put since.

        Raises:
            TypeError: It is a subclass of Tensor, or has no plain memory.
            ValueError: It has gaps or no elements, is on another device, or lazily conjugate or negative; or
                the engine is closed.
            MemScaleError: A copy could not be submitted.
        """

    def region(self, ordinals: tuple[int, ...] | None, ahead_bytes: int = 0, /) -> None:
        """A forward begins: saves are counted from 0, and only those of the tuple leave. None: all may.

        Tensors that are saved in one region are fetched ahead together. Once the first of them is used, so
        many bytes of the region that is used next may come back as well; no fetch goes beyond that.
        """

    def settle(self) -> None:
        """Waits until no source waits for its copy.

        Raises:
            RuntimeError: The engine is closed.
            KeyboardInterrupt: Or whatever a signal's handler raised meanwhile. So do `pack` and `unpack`.
        """

    def step(self) -> None:
        """A training step begins. Without this call one begins when all saved tensors are gone."""

    def counters(self) -> dict[str, int]:
        """What was done so far: bytes and counts by tier, prefetch, time waited, what became of saves."""

    def trace(self) -> list[tuple[str, str, int, int, int, int]]:
        """The latest events, oldest first: (kind, tier, bytes, begin_ns, end_ns, ticket).

        Kinds are ``"out"``, ``"in"``, ``"wait_settle"``, ``"wait_arrive"`` and ``"drop"``; time 0 is the
        engine's start.
        """

    def notes(self) -> dict[str, str]:
        """Per tier, why it is not used as asked; "" if there is nothing to say."""

    def close(self) -> None:
        """Gives everything back. What was saved cannot be unpacked any more; blocks are dropped."""

@final
class Optim:
    """Optimizer steps on arrays in this host's memory, or a card's: ``memscale/optim.h``.

    Arrays are given by address and bytes, as of ``Tensor.data_ptr()``, and the bytes must be those that the
    rule asks for. The caller keeps the tensors alive; the GIL is released meanwhile.

    A rule is a dict: ``kind`` ("adamw", "adam", "sgd", "lion"); ``gradient`` ("fp32", "bf16", "fp16"),
    ``weights`` ("fp32", "master_fp32", "master_rest16", "master_rest8") and ``moments`` ("fp32", "bf16",
    "code8"); ``learning_rate``, ``beta1``, ``beta2``, ``epsilon``, ``weight_decay``, ``momentum``,
    ``dampening``, ``nesterov``, ``maximize``, ``gradient_scale``. All but the kind have defaults.

    A tensor is (count, first, step) and then (address, bytes) of gradient, weight, master, moment1, moment2,
    scale1 and scale2, in one flat tuple.

    Args:
        threads: That work in a call, the caller's among them, 1 to 256.
        isa: Instruction set: "any", "scalar", "avx2", "avx512".
        card: Whose memory the arrays are in; None: the host's. Calls then submit their work and return, and
            the tensors must stay until it is done. Only `norm` waits.
        stream: Of the card, as ``torch.cuda.Stream.cuda_stream``; 0: its default stream.

    Raises:
        ValueError: Threads out of range, no such instruction set; in every method, a rule or an array that
            is not allowed, named in the message. Nothing has been changed then.
        MemScaleError: The instruction set does not run here, or there is no compiler for the card (status
            ``EUNSUPPORTED``); of a card, in every method, its driver's errors (``EDRIVER``, ``ESTATE``).
        torch.OutOfMemoryError: A card has no memory for its kernels or, in `norm`, for sums.
    """

    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str:
        """The instruction set that was chosen."""

    def __new__(
        cls, threads: int = 1, isa: str = "any", *, card: Card | None = None, stream: int = 0
    ) -> Optim: ...
    @staticmethod
    def sizes(rule: _Rule, count: int) -> dict[str, int]:
        """Bytes of each array of a tensor of so many elements: ``weight_bytes`` and so on; 0: none."""

    def step(self, rule: _Rule, tensors: list[tuple[int, ...]]) -> None:
        """One step of all tensors."""

    def norm(self, arrays: list[tuple[int, int, str]], scale: float = 1.0) -> tuple[float, int]:
        """Sum of squares of the finite elements, each times `scale`, and how many are not finite."""

    @staticmethod
    def clip_factor(sum_of_squares: float, max_norm: float, /) -> float:
        """What ``torch.nn.utils.clip_grad_norm_`` multiplies with."""

    def accumulate(self, sums: _Span, gradient: tuple[int, int, str]) -> None:
        """Adds a gradient to sums in FP32."""

    def convert(self, target: tuple[int, int, str], source: tuple[int, int, str]) -> None:
        """Converts (address, bytes, type) to another type, to nearest."""

    def split(self, form: str, whole: _Span, weight: _Span, master: _Span) -> None:
        """FP32 masters into weights and, by form, a copy or a rest."""

    def join(self, form: str, weight: _Span, master: _Span, whole: _Span) -> None:
        """The masters of weights and rests, in FP32."""

    def moments_read(
        self, rule: _Rule, tensor: tuple[int, ...], moment1: _Span | None, moment2: _Span | None
    ) -> None:
        """Moments as FP32; gradient, weight and master of the tensor are not looked at."""

    def moments_write(
        self, rule: _Rule, tensor: tuple[int, ...], moment1: _Span | None, moment2: _Span | None
    ) -> None:
        """Moments from FP32, rounded to nearest."""

@final
class Card:
    """An NVIDIA card in the context that PyTorch uses, for an `Optim` or a `FingerprintTable`.

    Args:
        ordinal: Which, as the driver counts.
        compiler: File name of NVRTC, which is opened when kernels are first needed; None: the system's.
        library: File name of the driver library; None: the system's.

    Raises:
        MemScaleError: No driver library, no such card (status ``ENODEV``, ``EDRIVER``).
    """

    @property
    def name(self) -> str:
        """What the driver calls it."""

    def __new__(cls, ordinal: int = 0, compiler: str | None = None, library: str | None = None) -> Card: ...

@final
class Recorder:
    """Records what a run does, into files of a folder, without waiting for them.

    What is recorded is copied into a ring; one thread of the core writes it. Where there is no room it is
    counted. ``memscale/record.h`` has the rest.

    Args:
        directory: Where the files are made. It exists.
        client: Names this process in the folder and at a server: letters, digits, ``_`` and ``-``.
        ring_bytes: A power of two.
        segment_bytes: Of a file, about.
        cap_bytes: Of all files.
        batch_seconds: How long a batch waits for more.

    Raises:
        ValueError: An argument is out of range.
        OSError: The folder cannot be written to.

    Example:
        >>> recorder = Recorder(folder, "1-0a")
        >>> recorder.row(0, 1700000000000, {"loss": 3.25})
        True
    """

    def __new__(
        cls,
        directory: str | bytes | PathLike[str],
        client: str,
        *,
        ring_bytes: SupportsIndex = 4194304,
        segment_bytes: SupportsIndex = 4194304,
        cap_bytes: SupportsIndex = 268435456,
        batch_seconds: float = 2.0,
    ) -> Recorder: ...
    def row(
        self, step: SupportsIndex, time_ms: SupportsIndex, values: dict[str, int | float], unit: str = ""
    ) -> bool:
        """Records numbers of a step.

        Args:
            step: Counts from 0.
            time_ms: Since 1970.
            values: By the name of their series.
            unit: Of all of them: ``"bytes"``, ``"ns"`` or ``""``.

        Returns:
            Whether there was room, and the run goes on.

        Raises:
            TypeError: A value is no number.
            ValueError: There are none or too many, or a name is not one.
        """

    def event(self, json: str | bytes, /) -> bool:
        """Records an event: a JSON object. Returns as `row`."""

    def document(self, name: str, json: str | bytes) -> bool:
        """Records a document in the place of an earlier one of this name. Returns as `row`."""

    def end(self, state: str, /) -> bool:
        """The run has ended, ``"finished"`` or ``"failed"``: nothing is taken any more. Returns as `row`."""

    def flush(self, seconds: float, /) -> bool:
        """Waits until what was recorded is on disk and complete. Returns whether it is."""

    def figures(self) -> dict[str, int]:
        """What became of what was recorded."""

    def close(self) -> None:
        """Writes the rest and ends the thread. More than once does nothing."""

@final
class Spool:
    """A file that a `Recorder` has written, batch by batch.

    Args:
        path: Of the file.
        offset: Where to begin: 0, or a batch's ``begin`` or ``end``.

    Raises:
        ValueError: It is no such file.
        OSError: It cannot be read.
    """

    def __new__(cls, path: str | bytes | PathLike[str], offset: int = 0) -> Spool: ...
    def next(self) -> dict[str, Any] | None:
        """The next batch; None: there is none.

        Returns:
            ``begin`` and ``end``, offsets in the file; ``sequence``; ``values``, ``events``, ``documents``,
            counts; ``is_complete``: another one follows; ``end_state``: 1 finished, 2 failed, else 0.
        """

    def body(self, client: str, /) -> bytes:
        """The batch that `next` gave last, as the JSON of a request."""

    def level(self) -> int:
        """How often every second row was removed from the file."""

    def damaged_bytes(self) -> int:
        """Bytes that are not what was written. A cut-off end is none."""

@final
class Simulator:
    """An allocator without memory, driven request by request.

    Kind ``"cuda"`` follows the rules of PyTorch's CUDA caching allocator, ``"host"`` counts live bytes.

    Args:
        kind: ``"host"`` or ``"cuda"``.
        alloc_conf: Text of ``PYTORCH_ALLOC_CONF``; for kind ``"cuda"``.
        capacity_bytes: Most that the driver gives; None: no limit.
        device_total_bytes: Memory of the device, to which a memory fraction applies; None: as
            ``capacity_bytes``.
        allowed_bytes: The memory fraction in bytes, as `torch.cuda.set_per_process_memory_fraction` sets
            it; None: what ``alloc_conf`` says.
        record_segments: Keep segment events.

    Raises:
        ValueError: An unknown or invalid setting, named in the message.
        MemScaleError: A setting that cannot be simulated (status ``EUNSUPPORTED``).

    Example:
        >>> simulator = Simulator("cuda", "max_split_size_mb:200", 24 << 30)
        >>> simulator.alloc(0, 3 << 20)
        >>> simulator.stats()["reserved_bytes.all.peak"]
        20971520
    """

    def __new__(
        cls,
        kind: Literal["host", "cuda"],
        alloc_conf: str = "",
        capacity_bytes: SupportsIndex | None = None,
        *,
        device_total_bytes: SupportsIndex | None = None,
        allowed_bytes: SupportsIndex | None = None,
        record_segments: bool = False,
    ) -> Simulator: ...
    def alloc(
        self,
        id: SupportsIndex,
        size_bytes: SupportsIndex,
        stream: SupportsIndex = 0,
        pool: SupportsIndex = 0,
    ) -> None:
        """Allocates under an unused id. Ids index a table, so they should be dense.

        Args:
            id: The caller's name for the block.
            size_bytes: What the program asks for; 0 takes no memory.
            stream: Any number; blocks of different streams never mix.
            pool: 0: the default pool; otherwise a private one, such as a CUDA graph's.

        Raises:
            ValueError: The id is in use.
            MemScaleError: Out of device memory (status ``EDEVMEM``), caches released as in PyTorch.
        """

    def free(self, id: SupportsIndex, /) -> None:
        """Frees an id at once. Raises ValueError if it is not in use."""

    def free_request(self, id: SupportsIndex, /) -> None:
        """Frees an id that another stream still uses: its bytes stop being allocated, the block stays active.

        The id stays taken until `free_complete`, even if a retry or `empty_cache` takes the block back.
        """

    def free_complete(self, id: SupportsIndex, /) -> None:
        """The streams that used a freed id have finished. Raises ValueError without a `free_request`."""

    def empty_cache(self) -> None:
        """Gives every unused segment back, as `torch.cuda.empty_cache`."""

    def release_pool(self, pool: SupportsIndex, /) -> None:
        """The last user of a private pool is gone; its unused segments go back like others from now on."""

    def set_capturing(self, capturing: bool, /) -> None:
        """Whether a CUDA graph is being captured; then a request that fails is not retried."""

    def reset(self) -> None:
        """Forgets everything but the options."""

    def reset_peaks(self) -> None:
        """Starts peaks anew from the present values, as `torch.cuda.reset_peak_memory_stats`."""

    def reset_accumulated(self) -> None:
        """Starts sums and event counts anew at 0, as `torch.cuda.reset_accumulated_memory_stats`."""

    def place_next_segment(self, address: SupportsIndex, /) -> None:
        """Puts the segment that is obtained next at an address, a multiple of 512; 0 takes that back.

        Between equal blocks the lower address is preferred, so a replay needs the real ones.
        """

    def stats(self) -> dict[str, int]:
        """Statistics named as in ``torch.cuda.memory_stats``, such as ``"allocated_bytes.all.peak"``."""

    def segments(self) -> list[_Segment]:
        """What is reserved now, in order of address, as ``torch.cuda.memory_snapshot``."""

    def segment_events(self) -> list[_SegmentEvent]:
        """Segment events so far, in order; empty without ``record_segments``."""

    def validate(self) -> None:
        """Checks every invariant of the simulator.

        Raises:
            MemScaleError: One does not hold (status ``EINTERNAL``): an error of this library.
        """

class _SnapshotDevice(TypedDict):
    """One device of a `Snapshot` in sums; the peaks are those of its trace."""

    device: int
    reserved_bytes: int
    allocated_bytes: int
    active_bytes: int
    requested_bytes: int
    segment_count: int
    block_count: int
    event_count: int
    reserved_peak_bytes: int
    requested_peak_bytes: int
    requested_peak_event: int

class _SnapshotSettings(TypedDict):
    """The allocator's settings when the snapshot was taken."""

    recorded: bool
    conf: str
    max_split_bytes: int | None
    garbage_collection_threshold: float
    expandable_segments: bool

class _SnapshotSegment(TypedDict):
    """One segment; ``blocks`` holds (address, size_bytes, requested_bytes, state) in order of address."""

    address: int
    total_bytes: int
    allocated_bytes: int
    active_bytes: int
    requested_bytes: int
    stream: int
    pool: tuple[int, int]
    is_large: bool
    is_expandable: bool
    blocks: list[tuple[int, int, int, str]]

class _SnapshotDifference(TypedDict):
    """The first difference of a replay: what happened, address and size, on either side."""

    kind: Literal["segment", "request", "map"]
    event: int
    expected: tuple[str, int, int] | None
    got: tuple[str, int, int] | None

class _SnapshotReplay(TypedDict):
    """What `Snapshot.replay` returns: the fields of ``msc_snapshot_replay_result``."""

    exact: bool
    difference: _SnapshotDifference | None
    difference_count: int
    first_event: int
    replayed_count: int
    segment_count: int
    release_count: int
    retry_count: int
    oom_count: int
    start_block_count: int
    map_block_count: int
    map_compared: bool
    reserved_peak_bytes: int
    recorded_reserved_peak_bytes: int
    requested_peak_bytes: int
    recorded_requested_peak_bytes: int
    allocated_peak_bytes: int
    active_peak_bytes: int

@final
class Snapshot:
    """A file of ``torch.cuda.memory._dump_snapshot``, read without executing anything in it.

    A pickle that asks for an object to be imported, called or built is refused; so is one that is damaged.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no snapshot; the message names the offset.
    """

    def __new__(cls, path: str | bytes | PathLike[str] | PathLike[bytes]) -> Snapshot: ...
    @property
    def devices(self) -> list[_SnapshotDevice]:
        """Sums and peaks of each device, by number."""
    @property
    def settings(self) -> _SnapshotSettings:
        """Settings of the allocator when the snapshot was taken."""
    def segments(self, device: SupportsIndex = 0) -> list[_SnapshotSegment]:
        """Segments of a device by address, with their blocks."""
    def events(self, device: SupportsIndex = 0) -> dict[str, int]:
        """How many events of each action the trace of a device has: ``"alloc"``, ``"oom"`` and so on."""
    def replay(
        self, device: SupportsIndex = 0, *, limits: dict[str, int | None] | None = None
    ) -> _SnapshotReplay:
        """Plays the trace of a device into the allocator simulator and compares.

        Args:
            device: Number of the device.
            limits: What the snapshot does not say, in bytes: ``device_total_bytes``, ``capacity_bytes`` (most
                that the driver gave), ``allowed_bytes`` (the memory fraction). Without a limit, releases of
                the cache are taken from the trace instead of being predicted.

        Raises:
            ValueError: No such device, or a setting that the simulator does not know.
            memscale.errors.MemScaleError: The state at the beginning of the trace cannot be derived.
        """
    def top_frames(
        self, device: SupportsIndex = 0, *, at_peak: bool = False, count: SupportsIndex = 10
    ) -> list[tuple[str, int, str, int, int]]:
        """Live bytes by the line that allocated them.

        Args:
            device: Number of the device.
            at_peak: At the moment when most bytes were requested, instead of at the end.
            count: At most so many.

        Returns:
            (file, line, function, requested bytes, allocations), most bytes first. The file is ``""`` for
            what has no stack.
        """

def decide(
    graph: Graph,
    budget_bytes: SupportsIndex,
    *,
    sim: _SimOptions | dict[str, Any] | None = None,
    rates: _Rates | dict[str, Any] | None = None,
    allow_checkpoint: bool = True,
    allow_selective: bool = True,
    force: bool = False,
    offload: _Offload | dict[str, Any] | None = None,
    rerun_bytes: SupportsIndex = 0,
) -> Plan:
    """Decides: the fastest plan whose replayed peak is within a budget.

    The same arguments give the same plan in any process and on any machine. A budget that cannot be met is
    no error: the plan with the smallest peak is returned, its ``fits`` is False. Other threads run meanwhile.

    Args:
        graph: A finished graph.
        budget_bytes: What the replayed peak (host: allocated, cuda: reserved) must not exceed.
        sim: The allocator that the step will run on; None: the host.
        rates: Rates of the machine; None: a 2-core host.
        allow_checkpoint: False: every module is kept.
        allow_selective: False: a checkpoint keeps none of what it recomputes.
        force: Plan even if the plain step fits.
        offload: How tensors may leave the device; None: they stay.
        rerun_bytes: Held all the time by a plan that runs anything a second time.

    Returns:
        The plan.

    Raises:
        ValueError: An unknown or invalid option, named in the message.
        RuntimeError: The graph is open.
    """

def frontier(
    graph: Graph,
    *,
    sim: _SimOptions | dict[str, Any] | None = None,
    rates: _Rates | dict[str, Any] | None = None,
    allow_selective: bool = True,
    allow_checkpoint: bool = True,
    offload: _Offload | dict[str, Any] | None = None,
    rerun_bytes: SupportsIndex = 0,
) -> list[tuple[int, int]]:
    """``(peak_bytes, step_ns)`` of every plan that `decide` chooses from, fastest first, peaks falling.

    Raises:
        ValueError: An unknown or invalid option, named in the message.
        RuntimeError: The graph is open.
    """

def replay(
    graph: Graph,
    plan: Plan | None = None,
    *,
    sim: _SimOptions | dict[str, Any] | None = None,
) -> _Replay:
    """Plays one step into the allocator simulator.

    Args:
        graph: A finished graph.
        plan: The plan of the step; None: the plain step.
        sim: The allocator; None: the host.

    Returns:
        Peak and statistics, and three series with one native-endian entry per executed operation, those
        inside a recompute included: ``live`` (uint64: highest allocated bytes while it ran), ``ops``
        (uint32: index of the operation) and ``recompute`` (uint8: 1 inside a recompute).

    Raises:
        ValueError: An invalid option, or a plan for another graph.
        RuntimeError: The graph is open.
        MemScaleError: The step needs more than ``capacity_bytes`` (status ``EDEVMEM``).

    Example:
        >>> live = array.array("Q", replay(graph)["live"])
    """

def step_events(graph: Graph, plan: Plan | None = None) -> _StepEvents:
    """What a step under a plan allocates, frees and runs, in order.

    Args:
        graph: A finished graph.
        plan: The plan of the step; None: the plain step.

    Raises:
        ValueError: A plan for another graph.
        RuntimeError: The graph is open.

    Example:
        >>> kinds = step_events(graph)["kind"]
        >>> kinds.count(0) >= kinds.count(1)  # what outlives the step is not freed
        True
    """

def op_times_ns(graph: Graph, rates: _Rates | dict[str, Any] | None = None) -> bytes:
    """Time of each operation by the cost model: native int64 values, for ``array.array("q")``.

    With what the buffers that it makes take, where `fresh_from_bytes` says that they take something.

    Raises:
        ValueError: An unknown or invalid rate, named in the message.
    """

def fingerprint(tensor: Any, sampled: bool = False) -> int:
    """64 bits that differ where the bytes of two tensors do.

    Equal bytes have equal fingerprints, on every machine and with any number of threads. Tensors that differ
    in a single number have different ones for certain, others with probability 1 - 2**-64. The C header
    ``memscale/fingerprint.h`` has the rest.

    Hashed are the stored bytes of each element, once, in the order of memory: gaps between rows and repeated
    rows of an expanded tensor do not count. Dtype, shape, strides and the conjugate and negative bits are not
    part of it: compare them, too. Large tensors are read without the GIL, from 8 MiB on by PyTorch's threads.

    Args:
        tensor: A ``torch.Tensor`` in host memory, of any dtype and layout of strides.
        sampled: Read a sixteenth of a tensor above 64 KiB, 4 KiB at a time. Enough for a tensor whose
            differences reach others that are read whole.

    Raises:
        TypeError: `tensor` is not a tensor.
        ValueError: It has no bytes in host memory: it is fake, sparse, or on another device.

    Example:
        >>> fingerprint(torch.arange(4)) == fingerprint(torch.arange(4).view(2, 2))
        True
    """

@final
class FingerprintTable:
    """Fingerprints that stay on a card: the values of `fingerprint`, for tensors in the card's memory.

    Keeping and comparing are submitted to a stream and wait for nothing; `read` tells what came out. All
    calls happen in the order in which they are made, whatever their streams. None may be made while a CUDA
    graph is captured. ``memscale/fingerprint.h`` has the rest.

    Args:
        card: Whose memory it is about. One thread at a time makes something on a card.
        slots: Fingerprints that are kept at a time.

    Raises:
        torch.OutOfMemoryError: The card has no memory.
        MemScaleError: It has no kernels (status ``EUNSUPPORTED``, ``EDRIVER``).
    """

    def __init__(self, card: Card, slots: SupportsIndex = 65536) -> None: ...
    @property
    def device_bytes(self) -> int:
        """What it takes of the card's memory, beside PyTorch's allocator."""
    def keep(self, tensor: Any, sampled: bool, stream: SupportsIndex) -> KeptFingerprint | None:
        """Submits the fingerprint of a tensor.

        Args:
            tensor: On the card. Free or change its memory behind this call, on the same stream.
            sampled: As for `fingerprint`.
            stream: As ``torch.cuda.Stream.cuda_stream``.

        Returns:
            The fingerprint, which has a slot for as long as it lives; None: no slot is free.

        Raises:
            TypeError: `tensor` is not a tensor.
            ValueError: It is not in the card's memory.
            MemScaleError: The driver has refused (status ``EDRIVER``).
        """
    def read(self) -> tuple[int, int, int, int] | None:
        """What comparisons have found since the last call. Waits for those that were submitted.

        Returns:
            How many found another value, and of the first of them its tag, the value kept and the value
            found; None: all were equal.

        Raises:
            MemScaleError: Work on the card has failed (status ``EDRIVER``).
        """

@final
class KeptFingerprint:
    """A fingerprint on a card. Its slot is free again when the object goes."""

    def compare(self, tensor: Any, tag: SupportsIndex, stream: SupportsIndex) -> None:
        """Submits a comparison with a tensor. Arguments and errors as for `FingerprintTable.keep`.

        Args:
            tensor: On the same card.
            tag: Names this comparison in what `FingerprintTable.read` tells.
            stream: As for `FingerprintTable.keep`.
        """
    def value(self) -> int:
        """The fingerprint. Waits for the card."""

@final
class Entries:
    """What some dictionaries hold at one moment, to be compared by identity.

    Keys and values are held for as long as this lives.

    Args:
        places: The dictionaries. What is none (a registry of a scripted module) is read by its ``items``.
        ours: A type; values of it are passed over when places are compared.

    Raises:
        TypeError: `places` is no sequence, or has something without ``items``.
    """

    def __init__(self, places: Iterable[Any], ours: type) -> None: ...
    def same(self) -> bool:
        """Whether the places hold the same objects in the same order.

        No value is compared: an equal one that is another object differs.
        """
    def held(self, place: SupportsIndex) -> dict[Any, Any]:
        """What a place held, as a dict.

        Args:
            place: Its number in ``places``.

        Raises:
            IndexError: No such place.
        """
    def values(
        self, first: SupportsIndex, last: SupportsIndex, without: AbstractSet[Any], opaque: AbstractSet[Any]
    ) -> list[Any]:
        """Values of some places, but for some names and types, and values of the type `ours`.

        Args:
            first: Number of the first place.
            last: Number behind the last place.
            without: Keys that are left out.
            opaque: Types whose values are left out; not those of subclasses.

        Raises:
            IndexError: No such places.
        """

def rule_text(key: str) -> str:
    """One clause of English for the key of a rule.

    Raises:
        ValueError: No such rule.
    """

def version() -> str:
    """Version of the C library, such as ``"0.1.0"``."""
