"""The parts of one running syncer, how they are connected, and the job's end.

The driver owns the core. Every other part gets what it uses: the core (to read), the model, the
durability, and ``emit``, by which it tells the core what has happened. Which part carries out which of the
core's actions is listed in ``_register``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import get_args

from diloco_protocol.arrays.layout import Layout
from diloco_protocol.documents import MergeSeconds, Report
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import ENDED_PHASES, JobPhase, SlotState, SyncerExit
from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core import events as ev
from diloco_syncer.core.config import learners_by_region
from diloco_syncer.core.core import Core
from diloco_syncer.output.model_file import ModelFile
from diloco_syncer.output.model_output import ModelOutput
from diloco_syncer.runtime.driver import RESTART, Driver
from diloco_syncer.runtime.durability import Durability, Snapshot
from diloco_syncer.runtime.event_log import EventLog
from diloco_syncer.runtime.global_model import Broadcast, GlobalModel
from diloco_syncer.runtime.initial_model import InitialModelUpload
from diloco_syncer.runtime.merger import MergeMaker, Merger
from diloco_syncer.runtime.multipart import MultipartUploads, TooManyUploads, UploadRefused
from diloco_syncer.runtime.optimizer_relay import OptimizerRelay
from diloco_syncer.runtime.pushes import ReceivedPushes
from diloco_syncer.runtime.traffic import Traffic, add_bytes
from diloco_syncer.runtime.version_recovery import VersionUploads
from diloco_syncer.server.bulk import BulkServer
from diloco_syncer.server.callers import SessionCallers
from diloco_syncer.server.downloads import Downloads, JobPayloads
from diloco_syncer.server.messages import Addressed
from diloco_syncer.server.pages.status_page import StatusPage
from diloco_syncer.server.sessions import Sessions
from diloco_syncer.server.tls.access import PLAINTEXT, CallAuthorizer
from diloco_syncer.server.tls.listener import PortListener
from diloco_syncer.server.uploads import Uploads
from diloco_syncer.shards.coordinator import Coordinator, ShardState
from diloco_syncer.store.checkpoint import Checkpoints, Restored
from diloco_syncer.store.records import MergeRecord
from diloco_syncer.store.spool import Spool
from diloco_syncer.store.tape import Tape

log = logging.getLogger(__name__)

LINGER_SECONDS = 10.0  # the longest stay after the end
REPORT_SECONDS = 3.0  # how long a caller may take to fetch the report after the end
MAKING_SECONDS = 1.0  # how long a caller waits until the report of the end is made: less than its own patience
DROP_SECONDS = 5.0  # between two searches for superseded versions that are not being downloaded
SWEEP_SECONDS = 10.0  # between two searches for uploads that are not continued
SPOOL_SECONDS = 5.0  # how long the end waits for offers to become durable


async def _repeat(seconds: float, work: Callable[[float], object]) -> None:
    """Call ``work`` with time.monotonic() every so many seconds."""
    while True:
        await asyncio.sleep(seconds)
        work(time.monotonic())


class Syncer:
    """One job's running syncer, without its servers. ``stay``: serve on after the job's end, until told to stop.
    ``plaintext``: the token that callers show where there is no ``listener``. ``expected``: learners may know from
    before where it listens. ``one_machine``: it listens on loopback alone. ``shard_host``: see ``Sessions``."""

    def __init__(
        self,
        job: DiLoCoJob,
        core: Core,
        model: GlobalModel,
        checkpoints: Checkpoints,
        tape: Tape,
        restored: Restored,
        loop: asyncio.AbstractEventLoop,
        listener: PortListener | None = None,
        stay: bool = False,
        plaintext: Credentials = PLAINTEXT,
        expected: bool = False,
        one_machine: bool = False,
        shard_host: str = "",
    ) -> None:
        name, runtime = job.metadata.name, restored.core["runtime"] if restored.core is not None else {}
        self.job = job
        self.core = core
        self.model = model
        self.min_epoch = 0  # after RESTART: claim a higher epoch than this
        self._checkpoints = checkpoints
        self._stay = stay
        self._expected = expected
        self._one_machine = one_machine
        self._report_fetched = False
        self._final_report: Report | None = None  # once the job has ended, and that is durable
        self._final_report_made = asyncio.Event()
        self._refused = Counter[str](runtime.get("refused"))  # uploads, by reason
        self._imbalances = 0  # rows of the ledger that were not exact at the last checkpoint
        self.driver = Driver(core, loop, self._end_caller)
        emit = self.driver.handle
        self.authorizer = CallAuthorizer(listener, learners_by_region(job), plaintext)
        self.traffic = Traffic(
            (region.name for region in job.spec.regions),
            partial(self._wire_bytes, listener) if listener is not None and listener.secure else None,
        )
        self.traffic.load(runtime.get("traffic", {}))
        self.event_log = EventLog(runtime.get("events", 0))
        self.durability = Durability(
            checkpoints=checkpoints,
            tape=tape,
            snapshot=self._snapshot,
            on_problem=self._on_store_problem,
            newest_records=lambda: [] if self.shards is not None else model.newest,
            optimizer=restored.optimizer,
            optimizer_bytes=restored.optimizer_bytes,
        )
        spool = Spool(checkpoints.store.local_path("spool"))
        self.relay = OptimizerRelay(model, self.durability, spool, emit)
        self.sessions = Sessions(
            job,
            core,
            self.durability,
            self.authorizer,
            relay=self.relay,
            traffic=self.traffic,
            emit=emit,
            stop_progress=lambda: core.stop_progress(self.driver.clock()),
            tensors=model.tensors,
            shard_host=shard_host,
        )
        self._decode_threads = ThreadPoolExecutor(model.threads, "decode")
        self._multipart = MultipartUploads(self._note_chunk, spool)
        self.pushes = self._make_pushes()
        seconds = runtime.get("seconds") or dict.fromkeys(MergeSeconds.model_fields, 0.0)
        self.merger = Merger(core, model, self.durability, emit, number=restored.number, seconds=seconds)
        self._maker = MergeMaker(core.config, core.epoch, model, self.pushes, writer=self.durability)
        self.initial_model = InitialModelUpload(
            name,
            core,
            model,
            self.durability,
            spool=spool,
            emit=emit,
            stop_by=self.driver.stop_by,
            begin_model=self.begin_model,
        )
        self.versions = VersionUploads(
            name,
            core,
            model,
            self.durability,
            decode_threads=self._decode_threads,
            next_number=self.merger.next_number,
            read_newest=self._read_newest,
            emit=emit,
            run_task=self.driver.run_task,
        )
        self._callers = SessionCallers(name, core, model, self.sessions, traffic=self.traffic, emit=emit)
        self.bulk = BulkServer(self.authorizer, self._make_uploads(), self._make_downloads())
        self.shards = self._make_shards() if job.spec.syncer.shards > 1 else None
        self.offers = self.pushes if self.shards is None else self.shards  # who has them
        self.output = ModelOutput.of(job, checkpoints.epoch.check)
        self.status_page = self._make_status_page()
        self._register()

    def _make_pushes(self) -> ReceivedPushes:
        return ReceivedPushes(
            self._check_push,
            lambda: self.core.is_recovering,
            self.model,
            self.durability,
            decode_threads=self._decode_threads,
            emit=self.driver.handle,
            run_task=self.driver.run_task,
            refused=self._refused,
        )

    def _wire_bytes(self, listener: PortListener) -> dict[str, tuple[int, int]]:
        sums = listener.bytes_by_place()
        if self.shards is not None:
            add_bytes(sums, self.shards.wire_bytes())
        return sums

    def _refusals(self) -> Counter[str]:
        """Refused uploads since the job's start, by reason."""
        shards = self.shards
        if shards is None:
            return self._refused
        return sum((Counter(shard.figures.refused) for shard in shards.shards), self._refused + shards.refused)

    def _make_shards(self) -> Coordinator:
        return Coordinator(
            self.core,
            self.model,
            self.merger,
            self._callers,
            check_push=self._check_push,
            emit=self.driver.handle,
            run_task=self.driver.run_task,
            stop=self.driver.stop,
            on_change=self._on_shards_changed,
            shards=[ShardState(index) for index in range(self.job.spec.syncer.shards)],
        )

    async def begin_model(
        self,
        layout: Layout,
        newest: Sequence[MergeRecord],
        frozen: str = "",
        frozen_digest: str = "",
        broadcasts: Sequence[Broadcast] | None = None,
    ) -> None:
        """Go on from these records, here or in the shards that have the fragments (``GlobalModel.begin``)."""
        if self.shards is None:
            self.model.begin(layout, newest, frozen, frozen_digest, broadcasts)
        else:
            await self.shards.begin(layout, newest, frozen, frozen_digest)

    def _read_newest(self, fragment: int) -> MergeRecord:
        record = self.model.newest[fragment]
        if self.shards is None or not record.epoch:  # a stand-in
            return record
        return self.durability.checkpoints.read_record(fragment, record.version)

    async def make_model_file(self, layout: Layout) -> ModelFile:
        """The file of the merged model as it is now; ``layout``: its own."""
        model, newest, read = self.model, list(self.model.newest), self.durability.checkpoints.read_record
        thetas = [record.theta for record in newest]
        if self.shards is not None:
            thetas = await asyncio.to_thread(lambda: [read(one.fragment, one.version).theta for one in newest])
        return ModelFile(
            self.job.metadata.name,
            self.core.epoch,
            layout,
            thetas,
            versions=[record.version for record in newest],
            frozen=await self.durability.read_blob(model.frozen) if model.frozen else None,
        )

    def _on_shards_changed(self) -> None:
        assert self.shards is not None
        self.sessions.set_shards(self.shards.where())
        self._on_store_problem(self.status_page.status().store_problem)

    def _check_push(self, push: PushHeader, process: str) -> None:
        if self.core.is_recovering:
            raise TooManyUploads
        if (refusal := self.core.check_push(push, process)) is not None:
            raise UploadRefused(*refusal)

    def _make_uploads(self) -> Uploads:
        """Whoever receives the uploads of each kind is there."""
        receivers = {
            "push": self.pushes.receive,
            "initial": self.initial_model.receive,
            "peer_state": self.relay.receive,
            "base": self.versions.receive,
        }
        return Uploads(self._callers, self._multipart, receivers, self._refused)

    def _make_downloads(self) -> Downloads:
        payloads = JobPayloads(self.job, self.model, self.durability, self.relay)
        return Downloads(self._callers, self.model, self.core.epoch, payloads.find)

    def _make_status_page(self) -> StatusPage:
        return StatusPage(
            self.job,
            self.core,
            self.driver.clock,
            self.model,
            durability=self.durability,
            merger=self.merger,
            sessions=self.sessions,
            authorizer=self.authorizer,
            traffic=self.traffic,
            event_log=self.event_log,
            refused=self._refusals,
            imbalances=lambda: self._imbalances,
            find_output=lambda: None if self.output is None else self.output.row,
            one_machine=self._one_machine,
            find_shards=lambda: [] if self.shards is None else self.shards.rows(),
        )

    def _register(self) -> None:
        """Which part carries out which action."""
        on, on_with, sessions = self.driver.on, self.driver.on_with, self.sessions
        on_with(ev.Persist, lambda: self.driver.generation, lambda _, generation: self.durability.persist(generation))
        if self.shards is None:
            on(ev.Merge, self.merger.queue.put_nowait)
            on(ev.AnswerPush, self.pushes.reply)
            on(ev.ReleasePush, self.pushes.release)
        else:
            on_with(ev.Merge, self.shards.count_returns, self.shards.merge)
            on(ev.AnswerPush, self.shards.answer)
            on(ev.ReleasePush, self.shards.release)
        on(ev.RecordEvent, lambda note: self.durability.note_event(self.event_log.record(note)))
        on(ev.RestartFromStore, self._restart)
        on(ev.SetPhase, self._set_phase)
        on_with(ev.Admit, lambda: tuple(self.model.broadcasts), sessions.admit)
        on_with(ev.Announce, lambda: tuple(self.model.broadcasts), sessions.announce)
        on(ev.Refuse, sessions.refuse)
        on(ev.RequestInitialModel, sessions.request_initial_model)
        for kind in get_args(Addressed):
            on(kind, sessions.send_action)

    def _end_caller(self, action: ev.Action, error: Exception) -> bool:
        """An action failed: end the session or the upload of whom it answers. False: it answers nobody."""
        if isinstance(action, ev.AnswerPush):
            return self.pushes.fail(action.handle, error)
        if isinstance(action, ev.Admit | ev.Refuse | ev.RequestInitialModel | Addressed):
            self.sessions.end_by_fault(action.connection, error)
            return True
        return False

    # ------------------------------------------------------------- life

    def start(self, behind: bool) -> None:
        """Begin all work. ``behind``: the tape tells of merges that the store does not have."""
        core, driver = self.core, self.driver
        ended = core.phase in ENDED_PHASES  # else a SetPhase will say so
        driver.start([record.made_in for record in self.model.newest], behind)
        seconds = self.job.spec.syncer.checkpoint.every_seconds
        for work in (
            self.merger.run(self._maker.make_version),
            self.durability.checkpoint_every(seconds, lambda: core.phase in ENDED_PHASES),
            self._check_ledger_every(seconds),
            self.initial_model.watch_sender(),
            _repeat(SWEEP_SECONDS, self._multipart.sweep),
            _repeat(SWEEP_SECONDS, self.model.buffers.sweep),
            _repeat(DROP_SECONDS, self.model.drop_superseded),
        ):
            driver.run_task(work)
        if ended:
            log.info("the job is %s already: %s", core.phase.value, core.phase_message)
            driver.run_task(self._finish(core.phase, again=True))

    async def close(self, checkpoint: bool) -> None:
        """Stop all work; with ``checkpoint``, make everything durable before (not after a higher epoch)."""
        if checkpoint:
            await self.offers.wait_spooled(SPOOL_SECONDS)
        await self.driver.cancel_tasks()
        await self._maker.close()
        await self.durability.close(checkpoint)
        self._decode_threads.shutdown(True, cancel_futures=True)
        self.pushes.close()
        self.relay.close()

    def _restart(self, action: ev.RestartFromStore) -> None:
        self.min_epoch = action.above
        self.driver.stop(RESTART, action.reason)

    def _snapshot(self) -> Snapshot:
        runtime = {
            "traffic": self.traffic.state(),
            "events": self.event_log.number,
            "refused": dict(self._refusals()),
            "seconds": self.merger.seconds,
        }
        document = {"core": self.core.state(self.driver.clock(), time.time()), "runtime": runtime}
        return Snapshot(self.driver.generation, document, list(self.core.versions), dict(self._refusals()))

    async def _check_ledger_every(self, seconds: float) -> None:
        """Every so many seconds look whether the ledger is exact. That it is not is a fault of this program, which
        stops nothing, and is said once and shown by a metric."""
        while True:
            await asyncio.sleep(seconds)
            wrong: list[str] = []
            for slot in range(len(self.core.slots)):
                await asyncio.sleep(0)  # learners are answered between two slots
                wrong += self.core.ledger.imbalances(slot) if self.core.ledger is not None else []
            if wrong and not self._imbalances:
                log.error("the ledger is not exact (%d rows), a fault of this program: %s", len(wrong), wrong[0])
            self._imbalances = len(wrong)

    def _on_store_problem(self, problem: str) -> None:
        self.sessions.send_phase(self.core.phase, problem or self.core.phase_message)

    # ------------------------------------------------------------- the job's end

    def _note_chunk(self, key: Hashable, process: str, count: int) -> None:
        self.relay.note_chunk(key, process, count)
        self.pushes.note_chunk(key)
        self.versions.note_chunk(key)

    def _set_phase(self, action: ev.SetPhase) -> None:
        self.sessions.send_phase(action.phase, self.durability.problem or action.message)
        if action.phase in ENDED_PHASES:
            self.driver.run_task(self._finish(action.phase))

    async def _finish(self, phase: JobPhase, again: bool = False) -> None:
        """Make the last checkpoint and the report, wait until learners have heard, and stop (or serve on).

        ``again``: the job had ended before this process began; its report stays if it was written. Learners that are
        joining again at that moment are waited for, or they would never hear of the end.
        """
        told = self.sessions.processes
        document = self.status_page.report()
        earlier = await asyncio.to_thread(self._checkpoints.read_report, document.outcome) if again else None
        self._final_report = earlier or document
        self._final_report_made.set()
        if earlier is None:
            await self.durability.checkpoint()
            await self._write_report(document)
        if phase is JobPhase.COMPLETE and self.output is not None:
            await self._write_output(self.output, self._final_report)
        if self._stay:
            log.info("the job is %s; status, report and export are served on", phase.value)
            return
        began = time.monotonic()
        while (waited := time.monotonic() - began) < LINGER_SECONDS:
            told |= self.sessions.processes
            away = (again and self._expected) or (not again and self._processes_away() - told)
            if not away and not self.sessions.count and (self._report_fetched or waited > REPORT_SECONDS):
                break
            await asyncio.sleep(0.05)
        outcome = SyncerExit.FAILED if phase is JobPhase.FAILED else SyncerExit.OK
        self.driver.stop(outcome, f"{phase.value}: {self.core.phase_message}")

    def _processes_away(self) -> set[str]:
        """The processes whose slots are held or lost, and of which it is not known that they have ended."""
        slots = self.core.slots
        return {
            s.holder.process
            for s in slots
            if s.holder.process and not s.holder.gone and (s.occupied or s.state is SlotState.LOST)
        }

    async def _write_report(self, document: Report) -> None:
        report = document.model_dump_json(indent=1).encode()
        await self.durability.run_write(self._checkpoints.write_report, report)

    async def _write_output(self, output: ModelOutput, report: Report) -> None:
        """Write the merged model to ``output.uri``, unless the report says that it lies there."""
        model, before = self.model, report.output
        if before is not None and before.state == "written" and before.uri == output.row.uri:
            output.row = before
            return
        if model.layout is None:
            return
        file = await self.make_model_file(model.layout)
        await output.write(model.layout, file, model.versions, report.model_dump_json(indent=1).encode())
        self._final_report = report.model_copy(update={"output": output.row})
        self._report_fetched = False  # whoever had it before had another
        await self._write_report(self._final_report)

    def report(self) -> Report:
        """The report as it stands; of a job that has ended, the one that the store has of its end, with what has become
        of the output since."""
        if self._final_report is None or self.core.phase not in ENDED_PHASES:
            return self.status_page.report()
        if self.output is None:
            return self._final_report
        return self._final_report.model_copy(update={"output": self.output.row})

    async def fetch_report(self) -> Report:
        """The report, for the caller for whom an ended syncer waits. Of a job that has ended it is the one of its end,
        which is made once the end is durable. Raises TimeoutError if that takes ``MAKING_SECONDS``."""
        if self.core.phase in ENDED_PHASES:
            await asyncio.wait_for(self._final_report_made.wait(), MAKING_SECONDS)
        document = self.report()
        self._report_fetched = True
        return document
