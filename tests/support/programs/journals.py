"""What a run's journal says of its updates."""

from edgeasync.core.hub.events import PushArrived
from edgeasync.core.recovery.log import event_of, read_entry
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.journal import JournalReading


def pushes_in(run):
    """Return the updates that the journal in this folder has."""
    found = []
    for record in JournalReading(FolderDisk(run)).records():
        event = event_of(read_entry(record.entry))
        if isinstance(event, PushArrived):
            found.append(event.push)
    return found
