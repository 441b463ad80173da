"""What a saver tells about itself to code that is not async, and the hook of its last word."""

from __future__ import annotations

import inspect

from .. import saver
from .._on_error import finish_on_error, note_failure
from ..stats import SaverStats
from ._entered import Entered

__all__ = ["Facts"]


class Facts(Entered[saver.Saver]):
    """The half of a saver that only looks."""

    @property
    def run_id(self) -> str:
        """The run's id, once the saver is entered."""
        return self._inner.run_id

    @property
    def stats(self) -> SaverStats:
        """What was saved so far and what it cost, as of now."""
        bridge = self._bridge
        return SaverStats() if bridge is None else bridge.ask(lambda: self._inner.stats)

    @property
    def stop_requested(self) -> str | None:
        """Why training is to stop, or None: look at it once a step."""
        return self._inner.stop_requested

    def request_stop(self, reason: str) -> None:
        """Ask training to stop; from any thread. The first reason stays."""
        self._inner.request_stop(reason)

    def _run_on_error(self, body: BaseException) -> None:
        """Call `save_on_error` on this thread, where the verbs it uses can block."""
        hook, self._inner._save_on_error = self._inner._save_on_error, None
        bridge = self._bridge
        if hook is None or bridge is None or isinstance(body, GeneratorExit):
            return
        try:
            outcome = hook(body)
            if inspect.isawaitable(outcome):
                seconds = self._inner._drain_timeout
                bridge.run(lambda: finish_on_error(outcome, body, seconds))
        except Exception as error:
            note_failure(body, error)
