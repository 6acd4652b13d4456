"""The worker that draws what physics workers have left in its slots."""

from __future__ import annotations

from sim_farm import render_devices
from sim_farm.shared_memory import slot_layout
from sim_farm.shared_memory.slot_layout import WorkerMemory
from sim_farm.workers.worker import Worker, WorkerSetup


class RenderWorker(Worker):
    """Draws the scenes that physics workers leave in its slots."""

    def __init__(self, setup: WorkerSetup, memory: WorkerMemory | None = None) -> None:
        super().__init__(setup, memory)
        spec = setup.spec
        self._owned = slice(setup.index - spec.physics_workers, spec.num_envs, spec.render_workers)

    def build(self) -> None:
        self._report(slot_layout.BUILDING)
        self._strike("start")
        render_devices.ask(self.setup.device)
        self._place_renderer()
        self._report_memory()
        self.slots["built"][self.setup.index] = 1
        self._report(slot_layout.WAITING)
        self._client.ring()

    def run_pending(self) -> int:
        self._place_renderer()
        pending = self._pending(self._owned, "simulated", "drawn")
        if pending:
            self._report(slot_layout.WORKING)
        for env in pending:
            ticket = self.slots["simulated"][env]
            assert self._frame_writer is not None, "nothing is submitted while renderers are away"
            self._strike("draw")
            self._frame_writer.draw(env)
            self.slots["drawn"][env] = ticket
            self._progress()
            self._client.ring()
        if pending:
            self._report(slot_layout.WAITING)
        return len(pending)

    def close(self) -> None:
        if self._frame_writer is not None:
            self._frame_writer.close()
