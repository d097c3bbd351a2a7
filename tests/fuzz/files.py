"""Every file that edgeasync reads and that no other target has: a device's, a hub's keys, settings, and data.

Each target writes its content to where the file belongs, and reads it as edgeasync does.
"""

import gzip
import io
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import safetensors
import safetensors.numpy

from edgeasync.async_train.data.images import read_picture
from edgeasync.async_train.data.mnist import read_idx
from edgeasync.autodiff.build import build_training_graph, read_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.config import convert, read_toml
from edgeasync.data.dataset import Dataset
from edgeasync.data.files import load
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import DeviceFolder, DeviceIdentity
from edgeasync.durable.json_file import read_json
from edgeasync.durable.keys import HubKeys, KeyPair, Token, operator_keys
from edgeasync.durable.local_file import LocalFile
from edgeasync.durable.peers_file import read_peers
from edgeasync.durable.quota_file import QuotaFile
from edgeasync.durable.run_folder import FORWARD_FILE, TRAINING_FILE
from edgeasync.durable.spool_file import SpoolFile
from edgeasync.errors import ConfigError, DataError, GraphError, ModelMismatchError, ProtocolError, StorageError
from edgeasync.graphs.evaluation import OnnxEvaluator
from edgeasync.graphs.graph_cache import GraphCache
from edgeasync.graphs.graph_model import load_graph
from edgeasync.graphs.model_file import read_model
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.host.readings import Readings
from edgeasync.losses import OnnxLoss
from edgeasync.ops.doctor.state import examine_state
from edgeasync.ops.trained import local_patterns
from edgeasync.runtime.agent_settings import AgentSettings
from edgeasync.runtime.hub_record import read_record, record_of
from edgeasync.runtime.hub_settings import HubSettings
from edgeasync.runtime.peer_settings import PeerSettings
from edgeasync.sdk.loop_state import LoopState
from edgeasync.sdk.run import _restored
from edgeasync.training.free_memory import free_bytes
from tests.support.formats.write_formats import FOLDER
from tests.support.models.graphs import forward_model

LOSS = """<ir_version: 9, opset_import: ["" : 18]>
    own (float[batch, 3] prediction, float[batch, 3] target) => (float total)
    { d = Sub(prediction, target) s = Mul(d, d) total = ReduceMean<keepdims = 0>(s) }"""

EXAMPLES = Path(__file__).parents[2] / "examples"


class FileTarget:
    """A file at `place` below a folder of its own. A class for each has `examples` and `read`."""

    place = ""
    refusals: tuple[type[Exception], ...] = (StorageError,)

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / self.place
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.inputs = list(self.examples())
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder)

    def examples(self):
        """Return valid content; it may write the files around it."""
        self.write()
        return [self.path.read_bytes()]

    def write(self):
        """Write a valid file."""

    def attempt(self, content):
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a secret, for its owner alone
            file.write(content)
        return self.read() is not False

    def read(self):
        raise NotImplementedError

    def check(self):
        pass


# -- a device's folder -------------------------------------------------------------------------------------------


class Identity(FileTarget):
    place = "identity.json"

    def examples(self):
        return [path.read_bytes() for path in sorted(FOLDER.glob("device/identity.json"))]

    def read(self):
        found = examine_state(self.folder, "pi", "")  # which raises nothing
        try:
            read_json(self.path, DeviceIdentity, remedy="")
        except StorageError:
            assert found.level == "fail"
            raise


class Start(Identity):
    """What a start of an agent makes of it: another identity, or the next incarnation."""

    def read(self):
        state = DeviceFolder(self.folder)
        try:
            state.open("pi")
        finally:
            state.close()


class Day(FileTarget):
    place = "quota.json"

    def examples(self):
        return [path.read_bytes() for path in sorted(FOLDER.glob("device/quota.json"))]

    def read(self):
        QuotaFile(self.folder).read()


class Kept(FileTarget):
    """A safetensors file of a device, read for the device that it says."""

    refusals = (StorageError, ProtocolError)

    def examples(self):
        self.state_id = ""
        found = [path.read_bytes() for path in sorted(FOLDER.glob(f"device/{self.place}"))[-1:]]
        (self.folder / "sound").write_bytes(found[0])
        with safetensors.safe_open(self.folder / "sound", framework="numpy") as file:
            self.state_id = file.metadata()["state_id"]
        return found


class Local(Kept):
    place = "local.safetensors"

    def read(self):
        LocalFile(self.folder, self.state_id).read()


class Spool(Kept):
    place = "spool.safetensors"

    def read(self):
        SpoolFile(self.folder, self.state_id).read()


class Held(Kept):
    place = "model.safetensors"

    def read(self):
        return SpoolFile(self.folder, self.state_id).read_model() is not None


class Graphs(FileTarget):
    place = f"{'a' * 64}.onnx"

    def examples(self):
        return [forward_model()]

    def read(self):
        GraphCache(self.folder).find("a" * 64, lambda _: None)


class Loops(FileTarget):
    """The place of a joined loop, as arrays in a spool."""

    place = "loop.safetensors"
    refusals = (ValueError,)

    def examples(self):
        state = LoopState()
        return [safetensors.numpy.save({name: np.asarray(array) for name, array in state.dump().items()})]

    def read(self):
        try:
            arrays = safetensors.numpy.load_file(self.path)
        except (safetensors.SafetensorError, KeyError, OSError, TypeError):
            return False
        LoopState().load(arrays, lambda: None)
        return True


# -- keys --------------------------------------------------------------------------------------------------------


class DeviceHub(FileTarget):
    place = "keys/hub.json"

    def write(self):
        DeviceKeys(self.folder).know(b"h" * 32, ("tcp://127.0.0.1:5555",), "pi-1")

    def read(self):
        DeviceKeys(self.folder).hub()


class Enrolling(DeviceHub):
    place = "keys/enrolling.json"

    def write(self):
        self.token = Token(b"s" * 32, b"h" * 32, "pi-1", ())
        DeviceKeys(self.folder).begin(self.token)

    def read(self):
        DeviceKeys(self.folder).begin(self.token)


class DeviceKey(FileTarget):
    place = "keys/device.key"

    def write(self):
        DeviceKeys(self.folder).own()

    def read(self):
        DeviceKeys(self.folder).own()


class OfHub(FileTarget):
    """A file of a hub's folder of keys."""

    def __init__(self, place):
        self.place = place

    def write(self):
        shutil.rmtree(self.folder / "keys", ignore_errors=True)
        self.keys = HubKeys.init(self.folder / "keys")
        self.keys.issue_token("pi-1", ("tcp://127.0.0.1:5555",), 0.0)
        self.keys.knock(KeyPair.make().public, "10.0.0.1", 0.0)
        self.keys.remember_addresses(("tcp://127.0.0.1:5555",))
        self.keys.allow("pi-2", "device", KeyPair.make().public)

    def read(self):
        self.keys.pair()
        operator_keys(self.keys.folder)
        self.keys.allow_list()
        self.keys.tokens()
        self.keys.pending()
        self.keys.addresses()


# -- settings ----------------------------------------------------------------------------------------------------


class Record(FileTarget):
    """`hub.json`, which a hub resumes from, and `export` looks into."""

    place = "hub.json"
    refusals = (StorageError, ConfigError)

    def examples(self):
        (self.folder / "checkpoint-0000000000-0.json").write_bytes(b"{}")
        settings = convert({"model": {"kind": "onnx", "file": "m.onnx"}}, HubSettings, where="test")
        return [record_of(settings), *[path.read_bytes() for path in sorted(FOLDER.glob("run/hub.json"))]]

    def read(self):
        local_patterns(self.folder)
        read_record(self.folder)


class Toml(FileTarget):
    place = "settings.toml"
    refusals = (ConfigError,)


class HubToml(Toml):
    def examples(self):
        return [(EXAMPLES / "hub.toml").read_bytes()]

    def read(self):
        read_toml(self.path, HubSettings)


class AgentToml(Toml):
    def examples(self):
        return [(EXAMPLES / "agent.toml").read_bytes()]

    def read(self):
        read_toml(self.path, AgentSettings)


class PeerToml(Toml):
    def examples(self):
        text = '[peer]\npeers = "peers.toml"\ndata = "a.npz"\nround_steps = 5\ncodec = "int8+zstd"\nepochs = 2.5\n'
        model = '[local]\nbatch_size = 8\n[model]\nkind = "mlp"\ninputs = 4\nhidden = [8]\nclasses = 2\n'
        return [(text + model).encode()]

    def read(self):
        read_toml(self.path, PeerSettings)


class PeersToml(Toml):
    def examples(self):
        entry = '{{name = "pi-{0}", address = "tcp://h{0}:5600", key = "{0:064x}"}}'
        return [f"peer = [{', '.join(entry.format(number) for number in (3, 4, 5))}]\n".encode()]

    def read(self):
        read_peers(self.path)


# -- models and data ---------------------------------------------------------------------------------------------


class SavedModel(FileTarget):
    place = "model.safetensors"

    def examples(self):
        return [path.read_bytes() for path in sorted(FOLDER.glob("run/model.safetensors"))[-2:]]

    def read(self):
        read_model(self.path)


class Prebuilt(FileTarget):
    """A training graph that a hub is given, and the values beside it."""

    place = TRAINING_FILE
    refusals = (GraphError, ConfigError, ModelMismatchError)

    def examples(self):
        self.built = build_training_graph(forward_model(), GraphSettings())
        self.values = dict(self.built.spec.views(self.built.initial))
        return [self.built.model]

    def read(self):
        read_training_graph(self.path.read_bytes(), self.values)


class Values(Prebuilt):
    place = "training.safetensors"

    def examples(self):
        super().examples()
        (self.folder / TRAINING_FILE).write_bytes(self.built.model)
        return [safetensors.numpy.save(self.values)]

    def read(self):
        load_graph(OnnxModel(file=str(self.folder / TRAINING_FILE)))


class OwnLoss(FileTarget):
    """A loss of the user's own, beside a sound model."""

    place = "loss.onnx"
    refusals = (GraphError, ConfigError)

    def examples(self):
        (self.folder / "model.onnx").write_bytes(forward_model())
        self.settings = OnnxModel(file=str(self.folder / "model.onnx"), loss=OnnxLoss(file=str(self.path)))
        return [onnx.parser.parse_model(LOSS).SerializeToString()]

    def read(self):
        load_graph(self.settings)


class Exported(FileTarget):
    """The forward model in a run's folder, into which `export` puts the trained values."""

    place = FORWARD_FILE
    refusals = (GraphError, ModelMismatchError)

    def examples(self):
        self.trained = {"head.bias": np.ones(3, np.float32)}
        return [forward_model()]

    def read(self):
        _restored(self.folder, self.trained)


class Evaluated(FileTarget):
    """The forward model in a run's folder, which a hub that resumes evaluates."""

    place = FORWARD_FILE
    refusals = (GraphError, ModelMismatchError, DataError)

    def examples(self):
        self.built = build_training_graph(forward_model(), GraphSettings())
        self.data = Dataset.of(np.ones((4, 8), np.float32), np.arange(4) % 3, where="test")
        return [forward_model()]

    def read(self):
        forward = self.path.read_bytes()
        OnnxEvaluator(forward, self.built.spec, GraphSettings(), self.data)(self.built.initial)


class Csv(FileTarget):
    place = "data.csv"
    refusals = (DataError,)

    def examples(self):
        return [b"a,b,y\n1.0,2.0,0\n3.5,4.0,1\n", b"\xef\xbb\xbfheat,state\n1e3,0.5\n"]

    def read(self):
        load(self.path)


class Idx(FileTarget):
    place = "train-labels-idx1-ubyte"
    refusals = (DataError,)

    def examples(self):
        return [bytes([0, 0, 8, 1, 0, 0, 0, 12]) + bytes(range(12))]

    def read(self):
        read_idx(self.path, 1)


class IdxGz(Idx):
    place = "train-labels-idx1-ubyte.gz"

    def examples(self):
        return [gzip.compress(content, mtime=0) for content in super().examples()]


class Picture(FileTarget):
    place = "picture.png"
    refusals = (DataError,)

    def examples(self):
        from PIL import Image  # noqa: PLC0415 - an extra

        found = []
        for kind in ("PNG", "JPEG", "BMP", "WEBP"):
            out = io.BytesIO()
            Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3)).save(out, kind)
            found.append(out.getvalue())
        return found

    def read(self):
        read_picture(self.path)


# -- the machine -------------------------------------------------------------------------------------------------


class Machine(FileTarget):
    """What the kernel says of the machine: the same content in each of its files."""

    place = "content"
    refusals = ()
    files = (
        "sys/firmware/devicetree/base/model",
        "sys/firmware/devicetree/base/serial-number",
        "sys/class/thermal/thermal_zone0/temp",
        "sys/class/thermal/thermal_zone0/type",
        "sys/devices/platform/soc/soc:firmware/get_throttled",
        "sys/class/power_supply/BAT0/type",
        "sys/class/power_supply/BAT0/capacity",
        "sys/class/power_supply/AC/online",
        "proc/meminfo",
        "proc/pressure/cpu",
        "proc/cpuinfo",
        "proc/self/mounts",
        "proc/mounts",
        "proc/self/cgroup",
        "proc/self/status",
        "sys/fs/cgroup/memory.max",
        "sys/fs/cgroup/memory.current",
        "sys/fs/cgroup/memory.stat",
        "etc/machine-id",
    )

    def examples(self):
        for name in self.files:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).symlink_to(self.path)
        return [
            b"MemTotal: 1024 kB\nMemAvailable: 512 kB\nVmSize: 3 kB\n",
            b"some avg10=1.25 avg60=0.00 total=5\nfull avg10=0.50 total=1\n",
            b"/dev/sda / ext4 rw,relatime 0 0\n0::/\ninactive_file 4096\n",
            b"throttled=0x50005\n",
            b"4096\n",
        ]

    def read(self):
        told = Readings(self.folder)
        for reading in (told.board, told.mark, told.zones, told.throttled, told.power, told.memory, told.metered):
            reading()
        told.pressure("cpu")
        told.processor()
        told.clock_synchronized()
        told.mount(Path("/home"))
        free_bytes(self.folder)


FILES = {
    "identity": Identity,
    "start": Start,
    "day": Day,
    "local": Local,
    "spool": Spool,
    "held": Held,
    "graphs": Graphs,
    "loop": Loops,
    "device-hub": DeviceHub,
    "enrolling": Enrolling,
    "device-key": DeviceKey,
    "hub-key": partial(OfHub, "keys/hub.key"),
    "hub-public": partial(OfHub, "keys/hub.pub"),
    "operator-key": partial(OfHub, "keys/operator.key"),
    "allowed": partial(OfHub, "keys/allowed"),
    "tokens": partial(OfHub, "keys/tokens"),
    "pending": partial(OfHub, "keys/pending"),
    "addresses": partial(OfHub, "keys/address"),
    "record": Record,
    "hub-toml": HubToml,
    "agent-toml": AgentToml,
    "peer-toml": PeerToml,
    "peers-toml": PeersToml,
    "saved-model": SavedModel,
    "prebuilt": Prebuilt,
    "values": Values,
    "own-loss": OwnLoss,
    "exported": Exported,
    "evaluated": Evaluated,
    "csv": Csv,
    "idx": Idx,
    "idx-gz": IdxGz,
    "picture": Picture,
    "machine": Machine,
}
