"""Changes an engine's weights, once nobody needs the old ones any more."""

from typing import NamedTuple

from jaxspec.config.checks import is_integer
from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.adaptive_trees import AdaptiveTrees
from jaxspec.engine.draft_watch import DraftWatch
from jaxspec.engine.plans.runner import PlanRunner
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.weights import as_loaded
from jaxspec.engine.requests import Requests
from jaxspec.engine.weights.rules import Rule
from jaxspec.scheduling.scheduler import Scheduler


class NewWeights(NamedTuple):
    params: EngineParams
    version: int


class WeightChanges:
    """The weights of an engine, and those that come next.

    From ``ask`` on no request begins, until ``apply`` has changed the weights, when all rows are
    empty.

    Attributes:
      version: of the weights in use.
      pending: the weights that come next; None: none were given.
    """

    def __init__(
        self, programs: Programs, shapes: AdaptiveTrees, watch: DraftWatch, requests: Requests
    ):
        self.version = 0
        self.pending: NewWeights | None = None
        self._programs, self._shapes, self._watch = programs, shapes, watch
        self._requests = requests

    @property
    def newest(self) -> NewWeights:
        """The weights that were given last, whether or not they are in use."""
        if self.pending is not None:
            return self.pending
        return NewWeights(as_loaded(self._programs.params), self.version)

    def next_version(self, version: int | None) -> int:
        """The version, or the last one that was given, and 1. Raises ValueError for no number."""
        if version is None:
            return self.newest.version + 1
        if not is_integer(version):
            raise ValueError(f"version must be an integer, got {version!r}")
        return int(version)

    def ask(self, params: EngineParams, version: int, rule: Rule, scheduler: Scheduler) -> None:
        """Use other weights next; those that still wait to be used never are. Requests go back that
        do not end first. No call may be in flight."""
        self.pending = NewWeights(params, version)
        scheduler.holds = True
        for sequence in scheduler.begun:
            generation = self._requests.running[sequence.request_id].generation
            if rule.ends_first(generation):
                continue
            old_text = (*generation.token_ids, *sequence.draft)
            scheduler.send_back(sequence, rule.draft(generation, old_text))
            self._shapes.forget(sequence.request_id)
            self._requests.begin_again(sequence.request_id)

    def apply(self, scheduler: Scheduler, runner: PlanRunner) -> None:
        """Use the pending weights for all requests. No row may be in use."""
        assert self.pending is not None, "no weights were given"
        (params, self.version), self.pending = self.pending, None
        scheduler.forget_prefixes()
        scheduler.holds = False
        self._watch.restart(params.drafter)
        self._programs.use(params)
        self._shapes.restart()
        runner.forget_texts()
        for request in self._requests.running.values():
            request.generation.version = self.version
