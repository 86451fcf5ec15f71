"""Notices that capacity is about to go. The only user of cloud metadata; never decides what to do about a notice."""

from spot_runtime.preemption.notice import PreemptionNotice, Watcher
from spot_runtime.preemption.notice_file import NoticeFileWatcher, write_notice
from spot_runtime.preemption.sigterm import SigtermWatcher
from spot_runtime.preemption.slot_file import SlotFileWatcher, SlotNotice, write_slots

__all__ = [
    "NoticeFileWatcher",
    "PreemptionNotice",
    "SigtermWatcher",
    "SlotFileWatcher",
    "SlotNotice",
    "Watcher",
    "write_notice",
    "write_slots",
]
