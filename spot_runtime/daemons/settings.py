"""What each daemon is started with. Owns names, defaults and bounds; never reads files, environment or the network."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from spot_runtime.config import ClusterConfig, Frozen
from spot_runtime.types import Pool

LOOPBACK = "tcp://127.0.0.1:0"


class ControlSettings(Frozen):
    """The control daemon: one a cluster."""

    bind: str = LOOPBACK
    """Address that clients, nodes and trainers connect to."""
    journal_path: str
    """File of the durable journal; made where it is missing."""
    store: str
    """URL of the tensor store."""
    cluster: ClusterConfig = ClusterConfig()
    """Leases, heartbeats, retries."""
    reward_url: str
    """Base URL of the reward service, as nodes reach it."""
    model_digest: str = ""
    """Digest of the model that nodes and trainer have loaded; jobs for another are refused. Empty: any."""
    resolution: int = Field(0, ge=0, le=8192)
    """Pixels that nodes are sized for; jobs for another are refused. 0: any."""
    window_max: int = Field(0, ge=0, le=200)
    """Longest SDE window that nodes hold; jobs with a longer one are refused. 0: any."""
    deterministic: bool = False
    """Whether nodes denoise each sample alone; jobs that need it are refused where they do not."""
    secret_key: str = ""
    """File of control's own CURVE key (`spotlight keys new`); needed where `bind` is neither loopback nor ipc."""
    allowed_keys: str = ""
    """Folder with the *.public keys of those who may connect."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Loopback port of /metrics for Prometheus; 0: a free one; None: no metrics."""


class NodeSettings(Frozen):
    """A node daemon: one a machine; starts its workers and, on a reserved node, the trainer."""

    secret_key: str = ""
    """File of the CURVE key that it and its trainer show to control; empty: none."""
    control_key: str = ""
    """File of control's public key; needed with `secret_key`."""

    node_id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Names the node towards control; the same after a restart."""
    pool: Pool
    """Where its capacity comes from."""
    slots: int = Field(1, ge=1, le=64)
    """Workers."""
    control_endpoint: str
    """Where control answers."""
    store: str
    """URL of the tensor store."""
    model: str
    """Pipeline folder, hub id or store:NAME."""
    model_digest: str = ""
    """Which model that has to be; empty: whichever it is."""
    resolution: int = Field(ge=8, le=8192)
    """Height and width in pixels that the latent arena is sized for."""
    folder: str
    """Scratch of this node: logs of its children, fetched adapters, the preemption notice."""
    cores: tuple[int, ...] | None = None
    """Cores of the node and its children; None: all."""
    threads: int = Field(1, ge=1, le=512)
    """Threads of each child's numeric libraries."""
    device: str = "cpu"
    """torch device of its workers and trainer."""
    window_max: int = Field(5, ge=1, le=200)
    """Longest SDE window that the arena holds."""
    step_deadline_s: float = Field(60.0, ge=0.5, le=3600)
    """A worker that takes longer over one command is killed."""
    with_trainer: bool = False
    """Starts the resident trainer."""
    deterministic: bool = False
    """Denoise each sample alone."""
    cluster: ClusterConfig = ClusterConfig()
    """Batch size, heartbeats, background commits."""

    @property
    def sleeps(self) -> bool:
        """Whether its workers and its trainer leave the device to each other."""
        return self.pool is Pool.RESERVED and self.cluster.sleeps_on(self.device)

    @property
    def notice_path(self) -> Path:
        """File whose appearance is a preemption notice to this node."""
        return Path(self.folder) / "notice.json"

    @property
    def slots_path(self) -> Path:
        """File whose appearance says which slots this node has from now on."""
        return Path(self.folder) / "slots.json"


class WorkerSettings(Frozen):
    """A worker: stands by, then holds weights and denoises. Which slot and device it serves comes with LoadWeights."""

    worker_id: str
    """Names the worker towards its node."""
    node_endpoint: str
    """Where its node answers."""
    model: str
    """Pipeline folder or hub id."""
    threads: int = Field(1, ge=1, le=512)
    """Threads of its numeric library."""
    dtype: str = "float32"
    """torch dtype of its weights and arithmetic."""
    offload_alone: bool = False
    """Without a group it keeps the transformer's blocks in host memory."""
    sleeps: bool = False
    """Its weights leave the device at times, so that others of its machine get them through the host's memory."""
    arena_fd: int = Field(ge=0)
    """Descriptor of the node's latent arena, inherited."""
    weights_fd: int = Field(ge=0)
    """Descriptor of the memory through which its workers share the weights, inherited."""
    arena_slots: int = Field(ge=1)
    """Slots of the arena."""
    tokens: int = Field(ge=1)
    """Image tokens of one latent."""
    channels: int = Field(ge=1)
    """Numbers a token."""
    window_max: int = Field(ge=1)
    """Longest SDE window that the arena holds."""


class TrainerSettings(Frozen):
    """The trainer: resident on a reserved node."""

    trainer_id: str
    """Names the trainer towards control."""
    control_endpoint: str
    """Where control answers."""
    store: str
    """URL of the tensor store."""
    model: str
    """Pipeline folder or hub id."""
    threads: int = Field(1, ge=1, le=512)
    """Threads of its numeric library."""
    device: str = "cpu"
    """torch device."""
    sleeps: bool = False
    """Its weights leave the device after each order."""
    heartbeat_s: float = Field(1.0, ge=0.05, le=600)
    """Time between heartbeats."""
    secret_key: str = ""
    """File of the CURVE key that it shows to control; empty: none."""
    control_key: str = ""
    """File of control's public key; needed with `secret_key`."""
    ranks: int = Field(1, ge=1, le=64)
    """Processes that train together; the trainer is the first of them and starts the others."""
    folder: str = ""
    """Where the other ranks log."""
    ranks_deadline_s: float = Field(300.0, ge=1, le=86_400)
    """A rank that the others wait for longer is lost, and the trainer starts anew."""


class TrainerRankSettings(Frozen):
    """One of the trainer's other ranks."""

    trainer_id: str
    """Names the rank in its log."""
    rank: int = Field(ge=1, lt=64)
    """Its number."""
    size: int = Field(ge=2, le=64)
    """Ranks in all."""
    rendezvous_port: int = Field(ge=1, le=65535)
    """Loopback port of the store where they meet."""
    store: str
    """URL of the tensor store."""
    model: str
    """Pipeline folder or hub id."""
    threads: int = Field(1, ge=1, le=512)
    """Threads of its numeric library."""
    device: str = "cpu"
    """torch device."""
    sleeps: bool = False
    """Its weights leave the device after each order."""
    deadline_s: float = Field(300.0, ge=1, le=86_400)
    """Bound of every wait for the others."""


class RewardSettings(Frozen):
    """The reward service: HTTP on loopback. Its token, if any, is the environment's SPOTLIGHT_REWARD_TOKEN."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = Field(0, ge=0, le=65535)
    """Port to bind; 0: a free one."""
    threads: int = Field(2, ge=1, le=256)
    """Images judged at the same time."""
    store: str = ""
    """URL of the tensor store; empty: there are no prompt rows to look at."""
    rewards: tuple[str, ...] = ()
    """Rewards that are loaded beside the embedded ones."""
    prompts_keys: tuple[str, ...] = ()
    """Store keys of prompt rows: rewards that they name are loaded too."""
