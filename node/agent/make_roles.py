"""Makes the two parts that a node may have, as its settings say: holding experts, and routing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from node import environment, log_levels
from node.agent.expert_role import ExpertRole
from node.agent.router_role import RouterRole
from node.log_files import EXPERTS_LOG, ROUTER_LOG
from node.models.index import ModelIndex
from node.models.manifest import expert_digests
from node.router.failure import ExpertFailure
from node.router.llama_server import EngineOptions
from node.router.programs import ModelPrograms
from node.settings.load import Config
from node.slices import Slice
from node.swarm_key import SwarmKey
from node.transfer.shared import SharedModels
from node.transfer.swarm_model import SwarmModel


class RoleMaker:
    """``logs``: the folder of the children's logs. ``on_change`` is what the parts call when they changed."""

    def __init__(
        self, config: Config, key: SwarmKey | None, logs: Path, model: SwarmModel, on_change: Callable[[], None]
    ) -> None:
        self._config = config
        self._logs = logs
        self._model = model
        self._on_change = on_change
        call_key = {} if key is None else {environment.CALL_KEY: key.derive("call").hex()}
        settings = {environment.POLL_US: str(config.node.poll_us), log_levels.VARIABLE: config.log.level}
        self._environment = {**settings, **call_key}

    def experts(self, memory_bytes: int) -> ExpertRole | None:
        """The part that holds experts in so much memory; None where it is switched off or there is no memory."""
        config = self._config
        if not config.experts.enabled or memory_bytes <= 0:
            return None
        return ExpertRole(
            config.node.name,
            host=config.node.expert_host,
            port=config.node.expert_port,
            device=config.experts.device,
            threads=config.experts.threads,
            max_rows=config.model.ubatch_tokens,
            memory_bytes=memory_bytes,
            log_path=self._logs / EXPERTS_LOG,
            environment=self._environment,
            on_change=self._on_change,
            check_file=self._model.check_file,
            provide=self._model.shared.provide,
            digests=partial(_digests, self._model.shared),
            measures_speed=True,
        )

    def router(
        self, index: ModelIndex, programs: ModelPrograms, term: int, on_failure: Callable[[ExpertFailure], None]
    ) -> RouterRole:
        """The part that routes a model, since this term. ``on_failure`` is told of layers that were not computed."""
        config = self._config
        return RouterRole(
            index,
            programs,
            term=term,
            options=EngineOptions(
                context=config.model.context_total_tokens,
                parallel=config.model.parallel,
                threads=config.router.threads,
                ubatch=config.model.ubatch_tokens,
                cache_ram_mib=config.model.prompt_cache_mib,
                extra=tuple(config.router.extra_arguments),
            ),
            reduce=config.model.reduce,
            dtype=config.model.dtype,
            log_path=self._logs / ROUTER_LOG,
            environment=self._environment,
            on_change=self._on_change,
            on_failure=on_failure,
            provide=partial(self._model.shared.provide_trunk, index),
        )


def _digests(shared: SharedModels, index: ModelIndex, slices: Sequence[Slice]) -> Mapping[Slice, Sequence[str]]:
    """SHA-256 of each expert of slices, as far as they are known. Blocks."""
    manifest = shared.manifest_of(index)
    # Where files changed since they were hashed, `check_unchanged` has spoken already.
    if manifest is None or manifest.model_id != index.model_id:
        return {}
    return expert_digests(index, manifest, slices)
