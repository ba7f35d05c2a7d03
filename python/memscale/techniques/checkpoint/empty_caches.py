# SPDX-License-Identifier: Apache-2.0
"""Key/value caches that return what a real cache returns, and keep nothing.

A transformers model with `use_cache` on, the default, makes a cache in every forward, in training too. A
block that is recomputed would append to it a second time, and it would hold keys and values that a plan has
dropped. Without a cache other bits come out: a cache returns `cat([nothing, keys])`, which is contiguous,
where without one attention reads a transposed view, and matrix products round by layout.

    real layer     update(k, v) ─► cat([keys, k]), cat([values, v])   kept, and returned
    empty layer    update(k, v) ─► the same of a fresh real layer     returned only

So a recompute finds what the forward found, runs the same operators and keeps nothing either. This holds for
as long as nobody reads from a layer what was put there before. Code that does gets `EmptyCacheError`, already
in the trace of a plan, and the model is planned with real caches then.

Caches become empty ones where they are made, by a hook on the constructors of transformers' caches, and only
inside `forward_with_empty_caches`, in its thread, with gradients enabled. Caches of other kinds, and those
that have content when they are made, stay as they are: blocks that are given one are not recomputed.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from memscale.errors import EmptyCacheError
from memscale.techniques.checkpoint.call_kinds import recompute_in_progress
from memscale.techniques.checkpoint.given_caches import is_cache, keeps_nothing, mark
from memscale.torchkit.forward_slot import serial_numbers


@dataclass
class Seen:
    """What a forward does with caches.

    Attributes:
        made: the empty ones that it has made.
        kept: kinds of those that it has made and that stay as they are.
        refused: what was asked of an empty one; the forward may have gone on without an answer.
        reads_lengths: of layers that were filled already.
    """

    made: list[Any] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    reads_lengths: bool = False


class _Forward(threading.local):
    """The forward that runs in this thread, if it is to make empty caches."""

    seen: Seen | None = None


class _Traced:
    """The same for code that torch.compile traces, which cannot guard on what a thread has.

    Attributes:
        made: as above, while the forward itself is traced.
        eager: some forward runs in Python, and may call compiled parts that make its caches.
    """

    made: list[Any] | None = None
    eager = False


_forward, _traced = _Forward(), _Traced()


def _refuse(what: str) -> NoReturn:
    if not torch.compiler.is_compiling() and _forward.seen is not None:
        _forward.seen.refused.append(what)
    raise _error(what)


def _error(what: str) -> EmptyCacheError:
    return EmptyCacheError(
        f"{what}, but caches that a forward makes for itself keep nothing while modules are checkpointed. "
        "Call the model with use_cache=True for a cache that keeps what it is given"
    )


def _recomputes() -> bool:
    return recompute_in_progress()[0] != math.inf


class _EmptyLayer:
    """In front of a real layer's class.

    It knows how long it would be, which positions and masks depend on. In a recompute it is as full as it was
    in the forward at that place: what came before is there, what came later is not.

        _filled      when it was filled, in the order of `serial_numbers`; 0: never
        _refilled    the recompute that has filled it last
        _length      what a real layer would say then
        _is_over     the forward that has made it is over: an answer would be mistaken for content
    """

    _filled = _refilled = _length = 0
    _is_over = False
    _real: type

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """What the real layer returns the first time."""
        self._look("a layer of a key/value cache is filled a second time")
        layer: Any = object.__new__(self._real)
        layer.__dict__.update(self.__dict__)
        result = layer.update(*args, **kwargs)
        if not torch.compiler.is_compiling():  # a side effect, which a compiled checkpoint must not have
            first, number = recompute_in_progress()
            if first == math.inf:
                self._filled, self._length = next(serial_numbers), layer.get_seq_length()
            else:
                self._refilled = number
        return result

    @property
    def _is_full(self) -> bool:
        """Whether a real layer would have content now."""
        if torch.compiler.is_compiling():
            return self._is_over
        first, number = recompute_in_progress()
        if first == math.inf:
            return self._is_over or self._filled > 0
        return 0 < self._filled < first or self._refilled == number

    def _look(self, what: str) -> None:
        if self._is_full:
            _refuse(what)

    def get_seq_length(self) -> Any:
        """As long as the real layer would be."""
        if not self._is_full:
            return super().get_seq_length()  # type: ignore[misc]
        if not self._is_over and _forward.seen is not None:
            _forward.seen.reads_lengths = True
            return self._length
        if not torch.compiler.is_compiling() and _recomputes():
            return self._length
        return _refuse("the length of a filled key/value cache is read")

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> Any:
        """For the mask, before the layer is filled."""
        self._look("the length of a filled key/value cache is read for a mask")
        return super().get_mask_sizes(*args, **kwargs)  # type: ignore[misc]

    def _content(self) -> None:
        self._look("the content of a filled key/value cache is read")

    def _set_content(self, value: Any) -> None:
        if value is not None:
            _refuse("the content of a key/value cache is set")

    keys = property(_content, _set_content)
    values = property(_content, _set_content)

    def __reduce__(self) -> Any:
        return _copied, (self._real, dict(self.__dict__))


def _copied(real: type, attributes: dict[str, Any]) -> Any:
    """A copy of an empty layer, which refuses what that one refuses."""
    layer: Any = object.__new__(_empty_kind(real))
    layer.__dict__.update(attributes)
    return layer


@functools.cache
def _empty_kind(real: type) -> type:
    return type(real.__name__, (_EmptyLayer, real), {"_real": real, "__module__": __name__})


class _NothingUpdated(dict[Any, Any]):
    """Which layers of a cross-attention cache are filled: none, as nothing is kept."""

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.filled: set[Any] = set()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not torch.compiler.is_compiling():
            self.filled.add(key)

    def __getitem__(self, key: Any) -> Any:
        self._look(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """What the model asks before it computes keys and values."""
        self._look(key)
        return super().get(key, default)

    def _look(self, key: Any) -> None:
        if key in self.filled and not _recomputes():
            _refuse("a filled layer of a cross-attention cache is asked for")


class _Kinds:
    """Classes of the installed transformers that are understood. Its caches consist of layers since 4.54."""

    def __init__(self, module: Any) -> None:
        layers = [getattr(module, name, None) for name in ("DynamicLayer", "DynamicSlidingWindowLayer")]
        self.layers = {kind: _empty_kind(kind) for kind in layers if isinstance(kind, type)}
        # Layers without attention of their own have nothing.
        self.nothing = getattr(module, "DummyLayer", None)
        self.caches = {module.Cache, module.DynamicCache}

    def why_not(self, cache: Any) -> str:
        """Why a cache that was just made stays as it is; "" if it need not."""
        if type(cache) not in self.caches or getattr(cache, "offloading", False):
            return type(cache).__name__
        for layer in cache.layers:
            if type(layer) is not self.nothing and type(layer) not in self.layers:
                return type(layer).__name__
            if layer.keys is not None:
                return f"{type(cache).__name__} with content"
        kind = cache.layer_class_to_replicate
        return "" if kind is None or kind in self.layers else str(kind.__name__)

    def empty(self, cache: Any) -> None:
        """Puts empty layers in the place of those of a cache."""
        cache.layers = [self._emptied(layer) for layer in cache.layers]
        if cache.layer_class_to_replicate is not None:
            cache.layer_class_to_replicate = self.layers[cache.layer_class_to_replicate]
        mark(cache)

    def _emptied(self, layer: Any) -> Any:
        kind = self.layers.get(type(layer))
        if kind is None:
            return layer
        empty: Any = object.__new__(kind)
        empty.__dict__.update(layer.__dict__)
        return empty


def _empties_caches() -> bool:
    """Whether what is running makes empty caches."""
    if not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():
        return _traced.made is not None or _traced.eager
    return _forward.seen is not None


def _made(cache: Any) -> None:
    """A cache was made: it gets empty layers, if that is possible."""
    assert hooks.kinds is not None
    why_not = hooks.kinds.why_not(cache)
    if not why_not:
        hooks.kinds.empty(cache)
    if torch.compiler.is_compiling():
        if not why_not and _traced.made is not None:
            _traced.made.append(cache)
    elif _forward.seen is not None:
        if why_not:
            _forward.seen.kept.add(why_not)
        else:
            _forward.seen.made.append(cache)


def _made_of_two(cache: Any) -> None:
    """A cache was made of two others, for self and cross-attention."""
    if keeps_nothing(cache.self_attention_cache) and keeps_nothing(cache.cross_attention_cache):
        cache.is_updated = _NothingUpdated(cache.is_updated)
        mark(cache)


class _Hooks:
    """On the constructors of transformers' caches, while anybody needs them."""

    def __init__(self) -> None:
        self.users = 0
        self.lock = threading.Lock()
        self.undo: list[Callable[[], None]] = []
        self.kinds: _Kinds | None = None

    def begin(self) -> None:
        """Each call wants an `end`."""
        with self.lock:
            self.users += 1
            module = sys.modules.get("transformers.cache_utils")
            if not self.undo and hasattr(module, "CacheLayerMixin"):  # it may come after the first user
                self._put(module)

    def end(self) -> None:
        """As before the matching `begin`."""
        with self.lock:
            self.users -= 1
            while not self.users and self.undo:
                self.undo.pop()()

    def _put(self, module: Any) -> None:
        self.kinds = _Kinds(module)
        self._hook(module.Cache, _made)
        if hasattr(module, "EncoderDecoderCache"):
            self._hook(module.EncoderDecoderCache, _made_of_two)

    def _hook(self, kind: Any, after: Callable[[Any], None]) -> None:
        original = kind.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if _empties_caches():
                after(self)

        def undo() -> None:
            if kind.__init__ is init:  # else somebody has another one on top, and this one does nothing
                kind.__init__ = original

        kind.__init__ = init
        self.undo.append(undo)


hooks = _Hooks()


def is_given_a_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the caller of a model wants a cache: by `use_cache=True`, or by one of their own."""
    if kwargs.get("use_cache") is True:
        return True
    return any(map(is_cache, tree_leaves((args, kwargs))))


def _over(made: list[Any]) -> None:
    """The forward that has made some caches is over: they have nothing of what it computed."""
    for cache in made:
        for layer in cache.layers:
            layer._is_over = True


_running = threading.Lock()
_eager: list[int] = []  # one entry for every forward that runs in Python


@contextmanager
def forward_with_empty_caches() -> Iterator[Seen]:
    """Caches that this thread makes in the block keep nothing.

    Raises:
        EmptyCacheError: one was asked for what it does not have, and the block has gone on.
    """
    before, seen = _forward.seen, Seen()
    _forward.seen = seen
    with _running:
        _eager.append(0)
        _traced.eager = True
    try:
        yield seen
        if seen.refused:
            raise _error(seen.refused[0])
    finally:
        _forward.seen = before
        with _running:
            _eager.pop()
            _traced.eager = bool(_eager)
        _over(seen.made)


def compiled_with_empty_caches(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The same around a call that torch.compile traces."""
    before = _traced.made
    made: list[Any] = []
    _traced.made = made
    try:
        return forward(*args, **kwargs)
    finally:
        _traced.made = before
        _over(made)
