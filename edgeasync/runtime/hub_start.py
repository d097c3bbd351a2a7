"""Create a hub from its settings file, including the model and the held-out data."""

import logging
from collections.abc import Callable

from msgspec.structs import replace

from edgeasync.config import expanded
from edgeasync.data.files import load as load_data
from edgeasync.errors import AddressError, DataError
from edgeasync.graphs.evaluation import make_evaluator
from edgeasync.graphs.graph_model import HubGraph, load_graph, with_own_loss
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.graphs.user_code import CustomModel
from edgeasync.losses import kind_of
from edgeasync.plugins import refuse_modules_in
from edgeasync.runtime.hosted_model import HostedModel
from edgeasync.runtime.hub import HubRuntime, OnReport
from edgeasync.runtime.hub_record import record_of
from edgeasync.runtime.hub_settings import HubSettings
from edgeasync.training.evaluation import Evaluator
from edgeasync.training.local_parameters import choose_local
from edgeasync.training.plan import CodeModel, ShippedModel

_log = logging.getLogger(__name__)

Load = Callable[[OnnxModel], HubGraph]


def make_hub(
    settings: HubSettings, on_report: OnReport | None = None, *, load: Load = load_graph, trust_code: bool = False
) -> HubRuntime:
    """Return a hub that is not yet running.

    `load` builds the training graph of an ONNX model, by default in this process. If `trust_code`
    is true, the hub also imports plugins that are named only in the run's folder. Raises
    `AddressError`, `ConfigError`, `DataError` or `GraphError`.
    """
    refuse_modules_in(expanded(settings.hub.run))
    settings = replace(settings, policy=settings.fleet_policy)
    if isinstance(settings.model, OnnxModel):
        settings = replace(settings, model=with_own_loss(settings.model))  # hub.json needs no other file
    if settings.hub.bind.startswith("inproc:"):
        raise AddressError(
            f"{settings.hub.bind}: no other process can connect to this address; use tcp://HOST:PORT"
        )
    graph = load(settings.model) if isinstance(settings.model, OnnxModel) else None
    model = _hosted(settings, graph)
    if settings.model.local:
        choose_local(model.spec, settings.model.local)
    return HubRuntime(
        settings,
        model,
        evaluator=_make_evaluator(settings, graph),
        record=record_of(settings),
        trust_code=trust_code,
        on_report=on_report,
    )


def _hosted(settings: HubSettings, graph: HubGraph | None) -> HostedModel:
    """Return the hub's model, from the settings or from the training graph built from them."""
    model = settings.model
    if isinstance(model, CustomModel):
        spec, first = model.load()
        return HostedModel(spec=spec, initial=lambda: first, shipped=CodeModel(local=model.local))
    if not isinstance(model, OnnxModel):
        settings.local.check_model(model.spec, "cross_entropy")
        return HostedModel(spec=model.spec, initial=lambda: model.initial(settings.hub.seed), shipped=model)
    assert graph is not None
    initial = graph.initial  # so that the hub can free the graph once its base is in a file
    for remark in graph.remarks:
        _log.warning("%s: %s", model.file, remark)
    settings.local.check_model(
        graph.spec, None if graph.forward is None else kind_of(model.loss), in_chunks=graph.in_chunks
    )
    return HostedModel(
        spec=graph.spec,
        initial=lambda: initial,
        shipped=ShippedModel(local=model.local),
        graph=graph.graph,
        forward=graph.forward,
        frozen=graph.frozen,
    )


def _make_evaluator(settings: HubSettings, graph: HubGraph | None) -> Evaluator | None:
    if settings.evaluation.data is None or isinstance(settings.model, CustomModel):
        return None
    try:
        return make_evaluator(settings.model, graph, load_data(expanded(settings.evaluation.data)))
    except DataError as error:
        raise DataError(f"evaluation.data: {error}") from error
