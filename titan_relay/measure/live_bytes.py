"""Live-bytes tracker: an exact, repeatable memory figure on CPU, CUDA and fake tensors.

`LiveBytes` counts each tensor storage once, from its creation to its death:

    with LiveBytes() as tracker:
        with tracker.phase("forward"):
            loss = model(x).sum()
        with tracker.phase("backward") as backward:
            loss.backward()
    print(tracker.peak_bytes, tracker.peak.label, backward.peak.by_phase())

What is counted: `UntypedStorage.nbytes()`, that is what was asked for, without the rounding and
the cache of an allocator. Views, detached aliases and in-place results share a storage and count
nothing. Storages that existed before are not counted, unless given to `include`.

How the traps of dispatch modes are met:

- A mode is off while an operator runs, so temporaries inside an operator written in Python
  (`torch.library`) would escape. For operators outside the built-in namespaces a torch-function
  mode is put up that turns this mode on again for every call inside the operator's body; it works
  alike for the body, for the shape function that stands for it on fake tensors, and for operators
  called by operators. The operator itself stays one call for every mode above this one, so
  selective activation checkpointing does not look inside.
- A mode runs before tensor subclasses do, and a DTensor would do its local work unseen. For wrapper
  subclasses this mode steps back (`NotImplemented`) and sees the plain calls that come out.
- DTensor finds out the shape of a result by computing with fake tensors of global shape, which the
  mode leaves out (`private_torch.around_sharding_propagation`).
- Resizing a storage in place is no operator (`private_torch.on_storage_resize`).
- Backward, recomputation in `torch.utils.checkpoint` included, runs with the modes that were on
  when `backward` was called, also on the autograd engine's own threads.

A buffer that a communication thread still holds is live, so with asynchronous collectives a figure
may depend on when that thread lets go.

Not seen: temporaries inside C++ and CUDA operators (a library's workspace), what other Python
threads allocate, and Python callbacks of higher-order operators. While the mode is on,
`torch.compile` runs its functions eagerly.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch

from titan_relay.measure.ledger import Event, Label, Ledger, Peak, Window
from titan_relay.measure.operators import (
    LookInside,
    OpTraits,
    resizable,
    storage_keys,
    tensors_in,
    traits_of,
)
from titan_relay.measure.storages import (
    Trackable,
    allocates_on_host,
    has_storage,
    is_wrapper,
    plain_tensors,
    storage_has_memory,
    tensors_of,
)
from titan_relay.private_torch import (
    OpOverload,
    TorchDispatchMode,
    around_sharding_propagation,
    keys_below,
    on_storage_resize,
    storage_id,
)

_OUTSIDE_PHASES = "(none)"


class _Entry(weakref.ref):
    """A watched storage: a weak reference that also carries what is counted for it."""

    __slots__ = ("excluded", "key", "label", "ledger", "num_bytes", "serial")

    ledger: Ledger
    key: int
    serial: int
    num_bytes: int
    label: Label
    excluded: bool


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts live tensor storages; see the module's docstring.

    Trackers nest, each with its own count. Counting goes on after exit for what is already
    counted: `live_bytes` falls as those tensors die. One tracker can be entered repeatedly, not
    within itself.

    Args:
        device_type: count only tensors on devices of this type ("cuda", "cpu"); None: all.
        keep_events: keep every change in `events`, which `peak_bytes_without` needs. Costs a
            tuple per allocation and per death.
    """

    supports_higher_order_operators = True

    def __init__(self, device_type: str | None = None, keep_events: bool = False) -> None:
        super().__init__()
        self._device_type = device_type
        self._ledger = Ledger(keep_events)
        self._host_ledger = Ledger()
        self._entries: dict[int, _Entry] = {}
        self._traits: dict[Any, OpTraits] = {}
        self._num_storages = 0
        self._phase = _OUTSIDE_PHASES
        self._enclosing_ops = ""
        self._num_pauses = 0
        self._hooks = ExitStack()
        # A storage can die on any thread, and also while this thread holds the lock.
        self._lock = threading.RLock()

    # Reading ----------------------------------------------------------------------------------

    @property
    def live_bytes(self) -> int:
        """Bytes of counted storages that are alive now."""
        return self._ledger.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Highest `live_bytes` since the start or the last `reset_peak` outside every phase."""
        return self._ledger.root.peak_bytes

    @property
    def peak(self) -> Peak:
        """The peak of `peak_bytes`: the operator and phase that reached it, and what was live."""
        return self._ledger.root.peak

    @property
    def host_bytes(self) -> int:
        """Live bytes that stand in for device memory (`host_allocation`), in no other figure."""
        return self._host_ledger.live_bytes

    @property
    def host_peak_bytes(self) -> int:
        """The highest `host_bytes` since the tracker was made."""
        return self._host_ledger.root.peak_bytes

    @property
    def events(self) -> list[Event]:
        """Every change in order (needs `keep_events`)."""
        return list(self._kept_events("events"))

    @property
    def num_events(self) -> int:
        """How many changes there have been (needs `keep_events`)."""
        return len(self._kept_events("num_events"))

    def serials_of(self, *owners: Trackable) -> set[int]:
        """Numbers, as in `events`, of the storages of `owners` that are counted and alive."""
        entries = (self._entries.get(storage_id(storage)) for storage in self._storages(owners))
        return {entry.serial for entry in entries if entry is not None}

    def peak_bytes_without(self, *owners: Trackable) -> int:
        """The overall peak had the storages of `owners` never existed (needs `keep_events`).

        For statements such as "the peak, not counting the tensors that become .grad", when these
        can be named only afterwards. The tensors must still be alive.
        """
        serials = self.serials_of(*owners)
        live_bytes = peak_bytes = 0
        for event in self._kept_events("peak_bytes_without"):
            if event.serial not in serials:
                live_bytes += event.delta_bytes
                peak_bytes = max(peak_bytes, live_bytes)
        return peak_bytes

    # Steering ---------------------------------------------------------------------------------

    def reset_peak(self) -> None:
        """Start the innermost peak again at what is live now; outer peaks keep what was reached."""
        with self._lock:
            self._ledger.reset()

    @contextmanager
    def phase(self, name: str) -> Iterator[Window]:
        """Name what happens inside and measure its own peak: `with tracker.phase("x") as w`.

        Allocations inside carry the name. Phases nest; `w.peak` is the phase's own peak, and the
        peaks around it include it.
        """
        with self._lock:
            outer_name, self._phase = self._phase, name
            window = self._ledger.open(name)
        try:
            yield window
        finally:
            with self._lock:
                self._phase = outer_name
                self._ledger.close(window)

    def name_phase(self, name: str) -> None:
        """Let allocations from now on carry this phase's name, without a peak of its own."""
        self._phase = name

    def include(self, *owners: Trackable, name: str = "(included)") -> None:
        """Count what already exists: tensors, modules (with gradients), optimizers, collections."""
        with self._lock:
            for storage in self._storages(owners):
                if storage_id(storage) not in self._entries:
                    self._add(storage, Label(name, "(included)"))

    def exclude(self, *owners: Trackable) -> None:
        """Stop counting these storages, now and when they are resized. Past peaks stay."""
        with self._lock:
            for storage in self._storages(owners):
                entry = self._entries.get(storage_id(storage))
                if entry is None:
                    entry = self._watch(storage, self._label("(excluded)"))
                self._set_size(entry, 0)
                entry.excluded = True

    def __enter__(self) -> Self:
        self._hooks.enter_context(on_storage_resize(self._on_resize))
        self._hooks.enter_context(around_sharding_propagation(self._pause))
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._hooks.close()

    # Counting ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if types and any(is_wrapper(tensor_type) for tensor_type in types):
            return NotImplemented
        kwargs = kwargs or {}
        if self._num_pauses:
            return func(*args, **kwargs)
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = traits_of(func)
        targets = resizable(traits, args, kwargs) if traits.may_resize else ()
        empty_inputs = [storage_id(s) for s in targets if s.nbytes() == 0]
        if traits.runs_python:
            outputs = self._run_looking_inside(func, traits.name, args, kwargs)
        else:
            outputs = func(*args, **kwargs)
        for output in tensors_in(outputs):
            self._see_output(output, traits, args, kwargs, empty_inputs)
        for storage in targets:
            self._see_resized(storage, traits.name)
        return outputs

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Count nothing new inside."""
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1

    def _run_looking_inside(self, func: OpOverload, name: str, args: tuple, kwargs: dict) -> Any:
        """Run an operator with this tracker on again inside its Python body.

        `redispatch` rather than a call, since the call itself must not reach the function mode.
        """
        outer = self._enclosing_ops
        self._enclosing_ops = f"{outer}{name}/"
        try:
            with LookInside(self):
                return func.redispatch(keys_below(tensors_in((args, kwargs))), *args, **kwargs)
        finally:
            self._enclosing_ops = outer

    def _see_output(
        self,
        output: torch.Tensor,
        traits: OpTraits,
        args: tuple,
        kwargs: dict,
        empty_inputs: Sequence[int],
    ) -> None:
        if is_wrapper(type(output)):
            for plain in plain_tensors(output):
                self._see_output(plain, traits, args, kwargs, empty_inputs)
            return
        if output.layout is not torch.strided:
            return
        storage = output.untyped_storage()
        key = storage_id(storage)
        if key in self._entries or not self._counts(output):
            return
        # An unknown storage that came in with the inputs is older than the tracker: not ours,
        # unless it was empty and this call gave it its memory.
        if traits.may_alias and key not in empty_inputs and key in storage_keys(args, kwargs):
            return
        with self._lock:
            self._add(storage, self._label(traits.name))

    def _see_resized(self, storage: torch.UntypedStorage, op_name: str) -> None:
        entry = self._entries.get(storage_id(storage))
        if entry is not None and entry.num_bytes != storage.nbytes():
            with self._lock:
                self._set_size(entry, storage.nbytes(), self._label(op_name))

    def _on_resize(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            entry = self._entries.get(storage_id(storage))
            if entry is not None:
                self._set_size(entry, storage.nbytes(), self._label("(storage resize)"))
            elif storage_has_memory(storage) and self._counts_device(storage.device.type):
                # Resizing allocates anew, so an older storage is ours from here on.
                self._add(storage, self._label("(storage resize)"))

    def _add(self, storage: torch.UntypedStorage, label: Label) -> None:
        self._set_size(self._watch(storage, label), storage.nbytes())

    def _watch(self, storage: torch.UntypedStorage, label: Label) -> _Entry:
        entry = _Entry(storage, self._on_death)
        entry.key = storage_id(storage)
        entry.serial = self._num_storages
        entry.num_bytes = 0
        entry.label = label
        entry.excluded = False
        entry.ledger = self._host_ledger if allocates_on_host() else self._ledger
        self._num_storages += 1
        self._entries[entry.key] = entry
        return entry

    def _label(self, op_name: str) -> Label:
        return Label(self._phase, self._enclosing_ops + op_name)

    def _set_size(self, entry: _Entry, num_bytes: int, label: Label | None = None) -> None:
        """Count `num_bytes` for a storage from now on, under a new label if one is given."""
        if entry.excluded or num_bytes == entry.num_bytes:
            return
        if entry.num_bytes:
            entry.ledger.shrink(entry.serial, entry.num_bytes, entry.label)
        entry.num_bytes = num_bytes
        entry.label = label or entry.label
        if num_bytes:
            entry.ledger.grow(entry.serial, num_bytes, entry.label)

    def _on_death(self, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
            self._set_size(entry, 0)

    def _counts(self, tensor: torch.Tensor) -> bool:
        return has_storage(tensor) and self._counts_device(tensor.device.type)

    def _counts_device(self, device_type: str) -> bool:
        return self._device_type is None or device_type in (self._device_type, "meta")

    def _storages(self, owners: Iterable[Trackable]) -> Iterator[torch.UntypedStorage]:
        for owner in owners:
            for tensor in tensors_of(owner):
                if self._counts(tensor):
                    yield tensor.untyped_storage()

    def _kept_events(self, what: str) -> list[Event]:
        if self._ledger.events is None:
            raise ValueError(f"LiveBytes.{what} needs LiveBytes(keep_events=True)")
        return self._ledger.events
