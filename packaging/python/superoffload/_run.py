"""A training run: the program as a child process, and its output files."""

from __future__ import annotations

import html
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ._metrics import Metrics, MetricsFile
from ._program import INTERRUPTED, failure, program

POLL_S = 0.1
"""Seconds between two reads of a run's files."""

DRAW_S = 1.0
"""Seconds between two updates of a notebook's display."""


STOPPED = (INTERRUPTED, -signal.SIGTERM)
"""Exit codes after a request to stop: with a checkpoint, or before the program handled signals, when there was nothing to save."""


class Run:
    """A run of the program. `superoffload.train` and `superoffload.start` create it.

    The run continues in the background and ends by itself. In a notebook, its display shows loss and progress. As a context manager, it stops the run
    at the end of the block, with a checkpoint, if the run has not ended.
    """

    def __init__(self, arguments: list[str], output_dir: str | os.PathLike[str]) -> None:
        self.output_dir = Path(output_dir)
        self._metrics = Metrics()
        self._file = MetricsFile(self.output_dir, is_new=True)
        self._is_stopped = False
        # A file instead of a pipe: the run does not block if nobody reads its output.
        self._log = tempfile.TemporaryFile()
        weakref.finalize(self, self._log.close)
        # A session of its own keeps Ctrl-C away from the program; `stop` ends it.
        self._process = subprocess.Popen(
            [program(), *arguments], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.returncode is None:
            self.stop()

    def __reduce__(self) -> Any:
        raise TypeError(f"a Run watches a process and cannot be pickled or copied: keep its output_dir, {str(self.output_dir)!r}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code of the program, negative for a signal; `None` while it runs. 75 means that the run was interrupted and can be resumed."""
        return self._process.poll()

    @property
    def log(self) -> str:
        """The program's output so far."""
        return self._said(0)

    def _said(self, offset: int) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), max(size - offset, 0), offset).decode(errors="replace")

    @property
    def metrics(self) -> Metrics:
        """The steps so far. Each step is a dict."""
        self._metrics.extend(self._file.read())
        return self._metrics

    @property
    def max_steps(self) -> int | None:
        """Number of steps of the whole run; `None` before the run has begun."""
        return self._file.facts.get("max_steps")

    @property
    def checkpoint(self) -> Path | None:
        """Path of the newest whole checkpoint, not of one that is still being written; `None` if there is none."""
        named = [path for path in self.output_dir.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
        found = [path for path in named if (path / "trainer_state.json").is_file()]
        return max(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None)

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yield each step as soon as it is done. Raises the exceptions of `wait` at the end."""
        told = 0
        while True:
            has_ended = self.returncode is not None
            metrics = self.metrics
            yield from metrics[told:]
            told = len(metrics)
            if has_ended:
                break
            time.sleep(POLL_S)
        self._check()

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end of the run. Ctrl-C stops the run with a checkpoint.

        Args:
            timeout: Seconds to wait. The run continues after a timeout.

        Raises:
            TrainError: The run failed. The message is the program's error message.
            Interrupted: Another process ended the run.
            TimeoutError: The run has not ended after `timeout` seconds.
        """
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the run still goes on after {timeout} seconds") from None
        except KeyboardInterrupt:
            self.stop()
            raise
        self._check()
        return self

    def stop(self, timeout: float | None = None) -> Run:
        """Ask the run to write a checkpoint and to end, and wait until it has ended.

        A run that has just been started may end without a checkpoint: nothing was trained, and `returncode` is -15.
        """
        self._is_stopped = True
        self._process.send_signal(signal.SIGTERM)
        return self.wait(timeout)

    terminate = stop

    def _check(self) -> None:
        code = self._process.wait()
        if code != 0 and not (self._is_stopped and code in STOPPED):
            raise failure(code, self.log)

    def _has_failed(self) -> bool:
        code = self.returncode
        return code not in (None, 0, INTERRUPTED) and not (self._is_stopped and code in STOPPED)

    def _show(self) -> Run:
        """Wait for the end of the run and show it meanwhile, as a display in a notebook or else as lines of text."""
        display = _notebook_display()
        handle, told = (display(self, display_id=True), 0) if display else (None, 0)
        try:
            while True:
                has_ended = self.returncode is not None
                if handle is not None:
                    handle.update(self)
                else:
                    told += self._print_from(told)
                if has_ended:
                    break
                time.sleep(DRAW_S if handle is not None else POLL_S)
        except KeyboardInterrupt:
            self.stop()
            raise
        return self.wait()

    def _print_from(self, offset: int) -> int:
        said = os.pread(self._log.fileno(), 1 << 20, offset)
        sys.stdout.write(said.decode(errors="replace"))
        sys.stdout.flush()
        return len(said)

    def __repr__(self) -> str:
        return f"<superoffload.Run {self._state()} {self.output_dir}>"

    def _state(self) -> str:
        code, metrics = self.returncode, self.metrics
        ended = "running" if code is None else "done" if code == 0 else "failed" if self._has_failed() else "interrupted"
        step = metrics[-1]["step"] if metrics else 0
        return f"{ended}, step {step} of {self.max_steps or '?'}"

    def _repr_html_(self) -> str:
        steps = [line for line in self.metrics if "loss" in line]
        step, last = (steps[-1]["step"], steps[-1]) if steps else (0, {})
        speed = f", loss {_number(last['loss'], '.4f')}, {_number(last.get('tokens_per_second'), '.0f')} tokens/s" if last else ""
        bar = f'<progress value="{step}" max="{self.max_steps or max(step, 1)}" style="width:100%"></progress>'
        failed = ""
        if self._has_failed():
            failed = f"<pre>{html.escape(str(failure(self.returncode or 1, self.log)))}</pre>"
        return f"<div>{html.escape(self._state() + speed)}{bar}{_curve(steps)}{failed}</div>"


def _number(value: float | None, form: str) -> str:
    """Format a value of a step. A value that is not finite is null in the file."""
    return "not finite" if value is None else format(value, form)


def _curve(steps: list[dict[str, Any]], width: int = 640, height: int = 160) -> str:
    """Draw the losses as an SVG line with at most one point per pixel."""
    points = [(line["step"], line["loss"]) for line in steps if isinstance(line["loss"], (int, float))]
    if len(points) < 2:
        return ""
    points = points[:: max(len(points) // width, 1)]
    (first, last), losses = (points[0][0], points[-1][0]), [loss for _, loss in points]
    low, high = min(losses), max(losses)
    across = lambda step: (step - first) / max(last - first, 1) * width  # noqa: E731
    down = lambda loss: (high - loss) / ((high - low) or 1) * (height - 20) + 10  # noqa: E731
    line = " ".join(f"{across(step):.1f},{down(loss):.1f}" for step, loss in points)
    return (
        f'<svg viewBox="0 0 {width} {height}" style="width:100%;max-width:{width}px" role="img" aria-label="loss by step">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        f'<text x="2" y="10" font-size="10">{high:.4f}</text><text x="2" y="{height - 2}" font-size="10">{low:.4f}</text></svg>'
    )


def _notebook_display() -> Any:
    """Return IPython's `display` in a notebook, else None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or "IPKernelApp" not in getattr(shell, "config", {}):
        return None
    from IPython.display import display

    return display
