"""Training of any head: a budget of minutes, checkpoints, held-out acceptance live."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from edgespec.cache import cannot_write
from edgespec.errors import FormatError, UsageError
from edgespec.progress import Progress, silent
from edgespec_export.train.machine import (
    interrupts_held,
    keep_freed_memory,
    prefers_bfloat16,
)
from edgespec_export.train.objective import Acceptance
from edgespec_export.train.optimizers import optimizers
from edgespec_export.train.packing import Batch, Batches, Row
from edgespec_export.train.shards import Stored

CHECKPOINT = "checkpoint.pt"
MEASURES = 20  # times in a budget
MEASURED_TOKENS = 50_000  # of each set
SAVE_SECONDS = 180.0
WARM_STEPS = 100
LAST_RATE = 0.05  # of the learning rate, at the end
CLIP = 1.0
_KEPT = {"settings", "module", "optimizers", "random", "at", "best", "losses"}
_AGAIN = "remove it, and training begins anew with the data there are"


class Trainee(Protocol):
    """A head in training: a torch module whose call is the loss of a batch."""

    kind: str
    depths: int

    def acceptance(self, batch: Batch) -> Acceptance:
        """Of greedy drafts along a batch of greedy replies."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long and in what portions.

    Args:
        rate: learning rate, `optimizers.optimizers`.
        width, rows: tokens of a row, rows of a batch.
    """

    minutes: float
    rate: float
    seed: int = 0
    width: int = 768
    rows: int = 3


@dataclass(slots=True)
class Measure:
    """Acceptance at one moment of the training."""

    seconds: float
    step: int
    loss: float  # mean since the last one
    by_depth: dict[str, list[float]]  # by the set measured
    tokens: dict[str, float]  # of a round of a chain

    def __str__(self) -> str:
        sets = [
            f"{name} {' '.join(f'{share:.3f}' for share in shares)} = "
            f"{self.tokens[name]:.2f}"
            for name, shares in self.by_depth.items()
        ]
        return " | ".join([f"{self.seconds / 60:.1f} min", f"{self.loss:.3f}", *sets])


@dataclass(slots=True)
class _Position:
    """Where the training is; what a checkpoint holds beside the weights."""

    seconds: float = 0.0
    epoch: int = 0
    batch: int = 0  # of the epoch, next
    step: int = 0
    tokens: int = 0
    history: list[Measure] = field(default_factory=list)


Save = Callable[[torch.nn.Module, list[Measure], int], None]
"""Called on the main process when the head is the best so far: its module, what was
measured, tokens trained on."""


class Loop:
    """One training.

    Args:
        module: the head, a Trainee.
        sequences: to learn from.
        measured: sets of sequences by name; the first one decides what is best.
        settings: what a checkpoint must have been made with to be resumed.
        save: see Save.
        clock: seconds of any origin.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        sequences: Sequence[Stored],
        measured: Mapping[str, Sequence[Stored]],
        budget: Budget,
        directory: Path,
        *,
        settings: Mapping[str, Any],
        save: Save,
        progress: Progress = silent,
        log: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        keep_freed_memory()
        self._accelerator = Accelerator(
            mixed_precision="bf16" if prefers_bfloat16() else "no"
        )
        self._budget, self._directory = budget, directory
        self._settings = dict(settings)
        self._save_best, self._progress, self._log = save, progress, log
        self._clock = clock
        self._batches = Batches(
            sequences, width=budget.width, rows=budget.rows, seed=budget.seed
        )
        self._measured = {
            name: Batches(_first(few), width=budget.width, rows=budget.rows, seed=0)
            for name, few in measured.items()
            if few
        }
        made = optimizers(module, budget.rate)
        self._rates = [group["lr"] for one in made for group in one.param_groups]
        self._module, *self._optimizers = self._accelerator.prepare(module, *made)
        self._at = _Position()
        self._best = -math.inf
        self._losses: list[float] = []

    @property
    def bare(self) -> torch.nn.Module:
        """The head itself."""
        found: torch.nn.Module = self._accelerator.unwrap_model(self._module)
        return found

    @property
    def history(self) -> list[Measure]:
        """What was measured so far."""
        return self._at.history

    def run(self) -> None:
        """Trains until the budget is used up.

        Ctrl-C ends it behind the step under way, with a checkpoint. Beside other
        processes, which would wait for this one's part, it ends at once.
        """
        if self._accelerator.num_processes > 1:
            self._run(lambda: False)
            return
        with interrupts_held() as is_interrupted:
            self._run(is_interrupted)

    def _run(self, is_interrupted: Callable[[], bool]) -> None:
        budget = self._budget.minutes * 60
        last, saved = self._clock(), self._at.seconds
        self._module.train()
        while self._at.seconds < budget:
            for batch in self._epoch():
                self._step(batch)
                now = self._clock()
                self._at.seconds = self._together(self._at.seconds + now - last)
                last = now
                self._at.batch += 1
                self._at.step += 1
                self._progress("train", int(min(self._at.seconds, budget)), int(budget))
                is_over = self._at.seconds >= budget
                if self._due() or is_over:
                    self._measure()
                is_stopped = is_interrupted()
                if self._at.seconds >= saved + SAVE_SECONDS or is_over or is_stopped:
                    self._save()
                    saved = self._at.seconds
                if is_over:
                    return
                if is_stopped:
                    self._log("stopped; --resume goes on from here")
                    raise KeyboardInterrupt
            self._at.epoch, self._at.batch = self._at.epoch + 1, 0

    def resume(self) -> None:
        """Goes back to the checkpoint.

        Raises UsageError without one, or when it was made with other settings;
        FormatError for a damaged one.
        """
        kept = read_checkpoint(self._directory, self._settings)
        try:
            self.bare.load_state_dict(kept["module"])
            states = zip(self._optimizers, kept["optimizers"], strict=True)
            for optimizer, state in states:
                optimizer.load_state_dict(state)
            torch.set_rng_state(kept["random"])
            history = [Measure(**measure) for measure in kept["at"].pop("history")]
            self._at = _Position(**kept["at"], history=history)
            self._best, self._losses = float(kept["best"]), list(kept["losses"])
        except torch.cuda.OutOfMemoryError:  # is one too, not the file's fault
            raise
        except (ValueError, TypeError, LookupError, RuntimeError) as error:
            path = self._directory / CHECKPOINT
            what = str(error).strip().rpartition("\n")[2].strip()
            raise FormatError(f"{path}: damaged: {what:.200}; {_AGAIN}") from error

    def _save(self) -> None:
        if not self._accelerator.is_main_process:
            return
        path = self._directory / CHECKPOINT
        part = path.with_name(f".{CHECKPOINT}.{os.getpid()}.part")
        kept = {
            "settings": self._settings,
            "module": self.bare.state_dict(),
            "optimizers": [one.state_dict() for one in self._optimizers],
            "random": torch.get_rng_state(),
            "at": asdict(self._at),
            "best": self._best,
            "losses": self._losses,
        }
        try:
            torch.save(kept, part)
            os.replace(part, path)
        except (OSError, RuntimeError) as error:  # torch's for a full disk
            part.unlink(missing_ok=True)
            raise cannot_write(path, error) from error

    def _epoch(self) -> Iterator[Batch]:
        """The rest of the epoch's batches of this process, each loaded beforehand."""
        count = self._accelerator.num_processes
        batches = self._batches.epoch(self._at.epoch)
        batches = batches[: max(1, len(batches) // count) * count]
        mine = batches[self._accelerator.process_index :: count][self._at.batch :]
        yield from _loaded(self._batches, mine, self._accelerator.device)

    def _step(self, batch: Batch) -> None:
        groups = [group for one in self._optimizers for group in one.param_groups]
        share = self._rate_share()
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate * share
        loss = self._module(batch)
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self._module.parameters(), CLIP)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._losses.append(float(loss.detach()))
        self._at.tokens += batch.tokens.numel() * self._accelerator.num_processes

    def _rate_share(self) -> float:
        share = min(1.0, self._at.seconds / (self._budget.minutes * 60))
        warm = min(1.0, (self._at.step + 1) / WARM_STEPS)
        falling = LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * share)) / 2
        return warm * falling

    def _due(self) -> bool:
        each = self._budget.minutes * 60 / MEASURES
        return self._at.seconds >= each * (len(self._at.history) + 1)

    def _together(self, seconds: float) -> float:
        """The main process' clock is everybody's."""
        if self._accelerator.num_processes == 1:
            return seconds
        device = self._accelerator.device
        shared = torch.tensor([seconds], dtype=torch.float64, device=device)
        return float(broadcast(shared)[0])

    def _measure(self) -> None:
        if self._accelerator.is_main_process:
            counted = {n: self._accepted(b) for n, b in self._measured.items()}
        else:
            counted = {}
        loss = sum(self._losses) / max(len(self._losses), 1)
        self._losses = []
        measure = Measure(
            self._at.seconds,
            self._at.step,
            loss,
            {name: accepted.by_depth for name, accepted in counted.items()},
            {name: accepted.tokens for name, accepted in counted.items()},
        )
        self._at.history.append(measure)
        if not self._accelerator.is_main_process:
            return
        self._log(str(measure))
        first = next(iter(measure.tokens.values()), -loss)
        if first >= self._best:
            self._best = first
            bare = copy.deepcopy(self.bare).cpu()
            self._save_best(bare, self._at.history, self._at.tokens)

    def _accepted(self, batches: Batches) -> Acceptance:
        total: Acceptance | None = None
        module: Any = self.bare
        device = self._accelerator.device
        module.eval()
        with torch.no_grad(), self._accelerator.autocast():
            for batch in _loaded(batches, batches.in_order(), device):
                found: Acceptance = module.acceptance(batch)
                if total is None:
                    total = found
                else:
                    total.add(found)
        module.train()
        assert total is not None
        return total


def read_checkpoint(directory: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A directory's checkpoint, if it was made with these settings.

    Raises UsageError without one or for other settings, FormatError for a damaged one.
    """
    path = directory / CHECKPOINT
    if not path.is_file():
        raise UsageError(
            f"--resume: {path}: no checkpoint; without --resume training begins, with "
            "the data there are"
        )
    try:
        kept = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except OSError:
        raise
    except Exception as error:  # whatever a damaged pickle makes of it
        raise FormatError(f"{path}: truncated or damaged; {_AGAIN}") from error
    missing = _KEPT - set(kept) if isinstance(kept, dict) else _KEPT
    if missing:
        raise FormatError(
            f"{path}: not a checkpoint: it lacks {', '.join(sorted(missing))}; {_AGAIN}"
        )
    for name, value in settings.items():
        if kept["settings"].get(name) != value:
            raise UsageError(
                f"--resume: {path} was made with {name} "
                f"{kept['settings'].get(name)!r:.60}, now {value!r:.60}; go on with "
                "what it was begun with, or begin another --out"
            )
    return dict(kept)


def _loaded(
    batches: Batches, wanted: list[list[Row]], device: torch.device
) -> Iterator[Batch]:
    """Batches in order, the next one on its way."""
    if not wanted:
        return
    with ThreadPoolExecutor(1) as pool:
        coming = [pool.submit(batches.load, rows) for rows in wanted[:1]]
        for rows in [*wanted[1:], None]:
            batch = coming.pop().result()
            if rows is not None:
                coming.append(pool.submit(batches.load, rows))
            yield batch.to(device)


def _first(sequences: Sequence[Stored]) -> list[Stored]:
    found, tokens = [], 0
    for sequence in sequences:
        if tokens >= MEASURED_TOKENS:
            break
        found.append(sequence)
        tokens += len(sequence)
    return found
