import io
import logging
import sys

from spot_runtime.daemons.log import KeyValueFormatter, configure


def record(message: str, *args: object, exc_info: object = None, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("spot_runtime.x", logging.INFO, "x.py", 1, message, args, exc_info)
    made.created, made.msecs = 1_700_000_000.25, 250.0
    vars(made).update(extra)
    return made


def test_a_record_is_one_line_of_time_level_speaker_event_and_extra() -> None:
    formatter = KeyValueFormatter(daemon="node", node_id="spot-0", run_id="")
    line = formatter.format(record("%d samples done", 3, job_id="explore-1", step_s=0.1234567, reason="too slow"))
    assert line == (
        '2023-11-14T22:13:20.250Z INFO daemon=node node_id=spot-0 event="3 samples done" job_id=explore-1'
        ' step_s=0.123457 reason="too slow"'
    )


def test_values_cannot_break_the_line_nor_forge_a_pair() -> None:
    line = KeyValueFormatter(daemon="node").format(
        record("a", text='x\n2023 ERROR y="z"', empty="", equals="a=b", long="l" * 5000)
    )
    assert "\n" not in line
    assert r'text="x\n2023 ERROR y=\"z\"" empty="" equals="a=b"' in line
    assert len(line) < 2200


def test_a_traceback_follows_its_line() -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        text = KeyValueFormatter(daemon="node").format(record("failed", exc_info=sys.exc_info()))
    lines = text.splitlines()
    assert lines[0].endswith("event=failed")
    assert lines[-1] == "ValueError: bad"


def test_configure_takes_over_the_root_logger() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    try:
        configure("control", {"run_id": "run-1"}, stream=stream)
        logging.getLogger("spot_runtime.any").info("joined", extra={"peer": "spot-0"})
        logging.getLogger("spot_runtime.any").debug("not shown")
        logging.getLogger("httpx").info("not shown")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert stream.getvalue().split(" ", 1)[1] == "INFO daemon=control run_id=run-1 event=joined peer=spot-0\n"
