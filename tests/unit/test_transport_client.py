import threading
import time
from collections.abc import Callable, Iterator

import pytest

from spot_runtime.client import Client, job_spec
from spot_runtime.errors import InputError, JobFailedError, ProtocolError, SpotlightError, UnreachableError
from spot_runtime.messages import (
    CancelJob,
    ClusterStatus,
    Codec,
    GetStatus,
    JobSpec,
    JobStatus,
    Message,
    PollJob,
    Refused,
    SubmitJob,
    ToControl,
)
from spot_runtime.transport import Router
from spot_runtime.types import ArmStats, BanditState, JobId, JobPhase, Op, PolicyRef

Answer = Callable[[ToControl], list[Message]]


class Control:
    """A router that answers each message with what it is told to."""

    def __init__(self, bind: str = "tcp://127.0.0.1:0") -> None:
        self.router: Router[ToControl] = Router(bind, Codec(ToControl))
        self.endpoint = self.router.endpoint
        self.received: list[ToControl] = []
        self.answer: Answer = lambda message: []
        self._open = True
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while self._open:
            for peer, message in self.router.receive(0.02):
                self.received.append(message)
                for reply in self.answer(message):
                    self.router.send(peer, reply)

    def close(self) -> None:
        self._open = False
        self._thread.join(10)
        self.router.close()


@pytest.fixture
def control() -> Iterator[Control]:
    control = Control()
    yield control
    control.close()


def seq_of(message: ToControl) -> int:
    assert isinstance(message, SubmitJob | PollJob | CancelJob | GetStatus)
    return message.seq


def status(seq: int, job_id: str = "rollout-0-ab", **fields: object) -> JobStatus:
    return JobStatus(seq=seq, job_id=JobId(job_id), op=Op.ROLLOUT, iteration=0, phase=JobPhase.RUNNING, **fields)


def a_job(**changes: object) -> JobSpec:
    values: dict[str, object] = {
        "run_id": "run-1",
        "op": Op.EXPLORE,
        "iteration": 3,
        "policy": PolicyRef(),
        "settings_json": "{}",
    }
    return job_spec(**{**values, **changes})


def test_each_call_sends_its_message_and_returns_the_reply(control: Control) -> None:
    control.answer = lambda message: (
        [ClusterStatus(seq=seq_of(message), trainer="ready")]
        if isinstance(message, GetStatus)
        else [status(seq_of(message), done=len(control.received))]
    )
    with Client(control.endpoint) as client:
        job = a_job()
        assert client.submit(job) == status(1, done=1)
        assert client.poll("rollout-0-ab") == status(2, done=2)
        assert client.cancel("rollout-0-ab", "no longer wanted") == status(3, done=3)
        assert client.status() == ClusterStatus(seq=4, trainer="ready")
    assert control.received == [
        SubmitJob(seq=1, job=job),
        PollJob(seq=2, job_id=JobId("rollout-0-ab")),
        CancelJob(seq=3, job_id=JobId("rollout-0-ab"), reason="no longer wanted"),
        GetStatus(seq=4),
    ]


def test_an_unreachable_endpoint_is_named_within_the_deadline() -> None:
    client = Client("tcp://127.0.0.1:1", deadline_s=0.3)
    began_s = time.monotonic()
    with pytest.raises(UnreachableError, match=r"^control at tcp://127\.0\.0\.1:1 did not answer within 0\.3 s$"):
        client.status()
    assert 0.3 <= time.monotonic() - began_s < 2
    client.close()


def test_a_malformed_endpoint_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="endpoint = 'nowhere': must look like"):
        Client("nowhere")


@pytest.mark.parametrize(
    ("name", "cls"),
    [("JobFailedError", JobFailedError), ("InputError", InputError), ("ErrorOfALaterVersion", SpotlightError)],
)
def test_a_refusal_is_raised_as_the_class_that_control_named(
    control: Control, name: str, cls: type[SpotlightError]
) -> None:
    control.answer = lambda message: [Refused(seq=seq_of(message), error_class=name, error="job = x: unknown")]
    with Client(control.endpoint) as client, pytest.raises(cls, match=r"^job = x: unknown$") as caught:
        client.poll("x")
    assert type(caught.value) is cls


def test_a_refused_frame_is_raised_though_control_could_not_read_its_number(control: Control) -> None:
    control.answer = lambda message: [Refused(error_class="ProtocolError", error="frame starts with b'SL02'")]
    with Client(control.endpoint) as client, pytest.raises(ProtocolError, match="SL02"):
        client.status()


def test_a_reply_of_another_kind_is_a_protocol_error(control: Control) -> None:
    control.answer = lambda message: [ClusterStatus(seq=seq_of(message))]
    with Client(control.endpoint) as client, pytest.raises(ProtocolError, match="answered PollJob with ClusterStatus"):
        client.poll("x")


def test_replies_with_another_number_are_dropped(control: Control) -> None:
    control.answer = lambda message: [status(seq_of(message) + 7, done=1), status(seq_of(message), done=2)]
    with Client(control.endpoint) as client:
        assert client.poll("rollout-0-ab").done == 2


def test_a_late_reply_never_answers_a_later_request(control: Control) -> None:
    held: list[ToControl] = []

    def late(message: ToControl) -> list[Message]:
        held.append(message)
        if len(held) == 1:
            return []
        return [status(seq_of(held[0]), done=1), status(seq_of(message), done=2)]

    control.answer = late
    with Client(control.endpoint, deadline_s=0.3) as client:
        with pytest.raises(UnreachableError):
            client.poll("rollout-0-ab")
        assert client.poll("rollout-0-ab") == status(2, done=2)


def test_a_request_is_asked_again_until_control_is_back(control: Control) -> None:
    endpoint = control.endpoint
    with Client(endpoint, deadline_s=20) as client:
        control.answer = lambda message: [status(seq_of(message))]
        client.poll("rollout-0-ab")
        control.close()
        replies: list[JobStatus] = []
        asking = threading.Thread(target=lambda: replies.append(client.poll("rollout-0-ab")))
        asking.start()
        time.sleep(0.3)
        again = Control(endpoint)
        again.answer = lambda message: [status(seq_of(message), done=5)]
        asking.join(15)
        again.close()
    assert [reply.done for reply in replies] == [5]


def test_threads_share_a_client_without_waiting_for_one_another(control: Control) -> None:
    def answer(message: ToControl) -> list[Message]:
        assert isinstance(message, PollJob)
        return [] if message.job_id == "slow" else [status(message.seq, message.job_id)]

    control.answer = answer
    client = Client(control.endpoint, deadline_s=3)
    slow_answers: list[bool] = []

    def poll_slowly() -> None:
        with pytest.raises(UnreachableError):
            client.poll("slow")
        slow_answers.append(False)

    slow = threading.Thread(target=poll_slowly)
    slow.start()
    replies: dict[str, str] = {}

    def poll(job_id: str) -> None:
        for _ in range(20):
            replies[job_id] = client.poll(job_id).job_id

    began_s = time.monotonic()
    threads = [threading.Thread(target=poll, args=(f"job-{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - began_s < 2.5
    assert replies == {f"job-{number}": f"job-{number}" for number in range(6)}
    slow.join(10)
    assert slow_answers == [False]
    client.close()


def test_the_same_work_has_the_same_job_id_and_any_difference_another() -> None:
    job = a_job()
    assert job.job_id.startswith("explore-3-")
    assert len(job.job_id) == len("explore-3-") + 16
    assert a_job() == job
    changes: list[dict[str, object]] = [
        {"run_id": "run-2"},
        {"op": Op.EVALUATE},
        {"iteration": 4},
        {"policy": PolicyRef(version=1, key="k", digest="d")},
        {"settings_json": "{ }"},
        {"bank_key": "b"},
        {"manifest_key": "b"},
        {"bandit": BanditState(arms=(ArmStats(sequences=8, effective_steps=5),))},
    ]
    ids = {a_job(**change).job_id for change in changes}
    assert len(ids | {job.job_id}) == len(changes) + 1


def test_a_run_that_is_given_more_iterations_another_target_or_a_moved_store_finds_what_it_has_done() -> None:
    first, more, moved, other = (
        a_job(settings_json=f'{{"iterations":{total},"seed":{seed},"store":"{store}","target_score":{target}}}')
        for total, target, seed, store in ((8, 0.0, 0, "a"), (20, 0.5, 0, "a"), (8, 0.0, 0, "b"), (8, 0.0, 1, "a"))
    )
    assert first.job_id == more.job_id == moved.job_id
    assert first.job_id != other.job_id
    assert '"iterations":20' in more.settings_json
