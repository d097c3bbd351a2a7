"""A hub's settings file as frozen structs. `docs/settings.md` lists every key."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from edgeasync.config import Section, to_table
from edgeasync.core.settings import HubCoreSettings, Limits, Liveness, StopCondition
from edgeasync.errors import AddressError
from edgeasync.policies.policy import Policy
from edgeasync.protocol.codecs import check_codec_name
from edgeasync.runtime.graph_model import OnnxModel, check_devices_can_feed, load_graph
from edgeasync.runtime.hub import Hub, OnReport
from edgeasync.training.numpy_models import Model
from edgeasync.training.plan import LocalTraining, ShippedModel, TrainingPlan


class HubSection(Section, frozen=True):
    """`[hub]`: where it listens, where its run lies, and when it ends."""

    bind: str = "tcp://127.0.0.1:5555"
    run: str = "runs/default"
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    save_every_s: Annotated[float, Meta(gt=0)] = 60.0
    stop: StopCondition = StopCondition()
    insecure: bool = False


class CodecSection(Section, frozen=True):
    """`[codec]`: how payloads travel, by name; a device that does not know a codec sends `identity`."""

    push: str = "identity"
    model: str = "identity"

    def __post_init__(self) -> None:
        check_codec_name(self.push)
        check_codec_name(self.model)


class HubSettings(Section, frozen=True):
    """A hub's settings file: everything has a default but the model."""

    model: Model | OnnxModel
    hub: HubSection = HubSection()
    local: LocalTraining = LocalTraining()
    policy: Policy = Policy()
    codec: CodecSection = CodecSection()
    liveness: Liveness = Liveness()
    limits: Limits = Limits()

    def make_hub(self, on_report: OnReport | None = None) -> Hub:
        """Return a hub that is not yet running; raises `AddressError`, `ConfigError` or `GraphError`."""
        if self.hub.bind.startswith("inproc:"):
            raise AddressError(f"{self.hub.bind}: no other process could reach it; write tcp://HOST:PORT")
        model: Model | ShippedModel
        if isinstance(self.model, OnnxModel):
            loaded = load_graph(self.model)
            check_devices_can_feed(loaded)
            spec, initial = loaded.spec, lambda: loaded.initial
            model, graph, forward = ShippedModel(), loaded.graph, loaded.forward
        else:
            model, graph, forward = self.model, None, None
            spec, initial = model.spec, lambda: model.initial(self.hub.seed)
        return Hub(
            spec=spec,
            initial=initial,
            judgement=self.policy,
            bind=self.hub.bind,
            run=Path(self.hub.run).expanduser(),
            settings=HubCoreSettings(
                liveness=self.liveness,
                limits=self.limits,
                stop=self.hub.stop,
                save_every_s=self.hub.save_every_s,
                push_codec=self.codec.push,
                model_codec=self.codec.model,
            ),
            training=to_table(TrainingPlan(model=model, local=self.local)),
            graph=graph,
            forward=forward,
            insecure=self.hub.insecure,
            on_report=on_report,
        )
