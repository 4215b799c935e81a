"""The leader's end: one reader and one ring for all ranks of a host, whoever copies from it.

The hub, a process of its own, passes records on to the ranks that need the chunk and returns a slot when all of them have
copied it. Shared bytes are thus read once and cross every GPU's own link; ranks exchange nothing. A rank that dies ends
the load of all.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from loader import budget
from loader import reader as wire
from loader.host_plan import HostPlan
from loader.hub_link import HubProcess, spawn_hub
from loader.options import StreamOptions
from loader.plan_wire import VERIFY_LEVELS, ReadSettings, encode_plan
from loader.reader_link import ChildReader, end_links, spawn_reader
from loader.slots import slots_to_keep

_CPUS_OF_A_RANK = 3  # the import, the uploader and its driver


class HostReader:
    """Starts reading at once; ranks join later, as many as the plan has members.

    Args:
        reader, hub: started before the plan was known. address: see `socket_address`.
    Raises: OSError: no child process, shared memory or socket here; nothing is left running.
    """

    def __init__(
        self,
        shared: HostPlan,
        directory: Path,
        options: StreamOptions,
        address: str,
        reader: ChildReader | None = None,
        hub: HubProcess | None = None,
    ) -> None:
        self.address = address
        self._hub = hub or spawn_hub()
        try:
            self._reader = reader or spawn_reader()
        except BaseException:
            self._hub.stop()
            raise
        self._thread = threading.Thread(target=self._watch, name="coldframe-host-reader", daemon=True)
        try:
            self._start(shared, directory, options)
            self._reader.close()  # the hub has it all; its process is still ours to end
            self._thread.start()
        except BaseException:
            self._hub.stop()
            end_links(self._reader)
            raise

    def stop(self) -> None:
        """End hub and reader now, whoever still wants from them. May be called again."""
        self._hub.stop()
        self._reader.stop()

    def wait_closed(self, timeout_s: float | None = None) -> bool:
        """Until all members have left and hub and reader have ended; whether that is so."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _start(self, shared: HostPlan, directory: Path, options: StreamOptions) -> None:
        """Open the socket, start the reader, hand both to the hub."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.address)
            listener.listen(len(shared.members))
            ring, filling, plan_bytes = self._begin(shared, directory, options)
            work = {
                "takers": [sum(1 << member for member in members) for members in shared.takers],
                "size": len(shared.members),
                "ring_bytes": ring.bytes,
                "slot_bytes": ring.slot_bytes,
                "keep": slots_to_keep(filling, ring.slot_bytes),
                "crash_place": plan_bytes,
            }
            self._hub.begin(work, [listener.fileno(), *self._reader.hub_fds()])

    def _begin(
        self, shared: HostPlan, directory: Path, options: StreamOptions
    ) -> tuple[budget.RingChoice, int, int]:
        """As a device's load does for one rank; slots are as many as the smallest member can fill.

        Returns: the ring, what the reader's threads fill at a time, bytes of the encoded plan.
        """
        cpus = budget.cpu_count()
        spare = _CPUS_OF_A_RANK * len(shared.members)
        threads = options.threads or budget.reader_threads(cpus.value, spare).value
        smallest = min(
            sum([chunk.bytes for chunk in plan.chunks if chunk.pieces or chunk.coded])
            for plan in shared.members
        )
        choice = budget.choose_ring(
            threads,
            shared.plan.chunk_bytes,
            smallest,
            budget.memory_headroom().value,
            options.ring_bytes,
            shared.plan.chunk_bytes,
            budget.SHARED_RING,
        )
        settings = ReadSettings(
            mode=wire.RING,
            threads=threads,
            verify=VERIFY_LEVELS[options.verify],
            slot_bytes=choice.slot_bytes,
            pool_bytes=choice.bytes,
            cpus=cpus.value,
            part_bytes=options.part_bytes,
            rate=(options.storage_gbps or 0.0) * 1e9,
            fault=options.storage_fault,
        )
        data = encode_plan(shared.plan, directory, settings).data
        self._reader.begin(data, choice.bytes)
        self._reader.give_slots(range(choice.slots))
        return choice, settings.filling_bytes, len(data)

    def _watch(self) -> None:
        """Tell the hub how the reader ended if it asks, and end both when it is done."""
        while self._hub.wait_asked():
            self._hub.answer(self._reader.stop(grace_s=1.0))
        self._hub.stop(grace_s=1.0)
        self._reader.stop()
