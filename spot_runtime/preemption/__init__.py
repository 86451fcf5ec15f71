"""Notices that capacity is about to go. The only user of cloud metadata; never decides what to do about a notice."""

from spot_runtime.preemption.notice import PreemptionNotice, Watcher
from spot_runtime.preemption.notice_file import notice_file_watcher, write_notice
from spot_runtime.preemption.sigterm import SigtermWatcher
from spot_runtime.preemption.slot_file import SlotNotice, slot_file_watcher, write_slots

__all__ = [
    "PreemptionNotice",
    "SigtermWatcher",
    "SlotNotice",
    "Watcher",
    "notice_file_watcher",
    "slot_file_watcher",
    "write_notice",
    "write_slots",
]
