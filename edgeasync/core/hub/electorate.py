"""Votes on the next version, and the devices for which it waits. Part of `PolicyEngine`."""

from edgeasync.core.hub.member import Member
from edgeasync.core.hub.membership import Membership
from edgeasync.core.hub.policy_state import PolicyEngineState
from edgeasync.policies.aggregation import Fleet, Waiting
from edgeasync.policies.frequency import INFREQUENT, Cadence


class Electorate:
    """Counts votes. Every voter has one vote, unless an operator has excluded it.

    No version waits for a device that is paused or infrequent, or whose newest update does not
    count.
    """

    def __init__(self, members: Membership, state: PolicyEngineState) -> None:
        self.state = state
        self.members = members

    @property
    def voters_live(self) -> int:
        """The number of voters that have a vote and at least one live device."""
        voters, orders = self.members.voters, self.state.divergence.orders
        return len(voters) - sum(voter in voters for voter in orders) if orders else len(voters)

    def fleet(self, waiting: Waiting | None = None) -> Fleet:
        """Return what an aggregator must know about the fleet.

        If `waiting` is passed, the votes of devices whose update was rejected are subtracted.
        """
        members, state = self.members, self.state
        voters: float = self.voters_live
        if waiting is not None:
            if members.pausing:
                voters += self._votes_of_the_pausing(waiting)
            if state.electorate.spoken:
                voters -= self._votes_of_the_refused(waiting)
        return Fleet(voters, state.cadence.period_s, members.shared, state.electorate.infrequent)

    def _votes_of_the_refused(self, waiting: Waiting) -> float:
        """Return how many votes belong to devices whose update does not count.

        Only updates for the next version are considered.
        """
        # Paused and excluded devices have no vote to subtract.
        heard = (self.state.electorate.infrequent, waiting.of_device, self.members.pausing)
        members, shared, orders = self.members.members, self.members.shared, self.state.divergence.orders
        spoken = self.state.electorate.spoken
        # Do not sum over a set. Its order, and so the last bit of the sum, changes with every start
        # of Python.
        refused = [members[device_id] for device_id in spoken if not any(device_id in part for part in heard)]
        return sum(1.0 / shared.get(member.voter, 1) for member in refused if member.voter not in orders)

    def _votes_of_the_pausing(self, waiting: Waiting) -> int:
        """Return the number of voters with a buffered update whose live devices all pause."""
        first = waiting.of_device
        spoken = {first[device_id].voter for device_id in self.members.pausing if device_id in first}
        return len(spoken - self.members.voters.keys())

    def note_infrequent(self, sample: list[Member], cadence: Cadence, now_s: float) -> None:
        """Determine which of these members are infrequent."""
        state = self.state.electorate
        overdue_s = now_s - INFREQUENT * cadence.period_s if cadence.period_s else -float("inf")
        voting = [member for member in sample if member.voter not in self.state.divergence.orders]
        state.infrequent = self.members.note_infrequent(state.infrequent, voting, cadence.infrequent_s, overdue_s)

    def forget_infrequent(self, device_id: str) -> None:
        """Remove a device from the infrequent devices.

        Replace the table instead of changing it, because its identity is the cache key of vote
        counts.
        """
        infrequent = self.state.electorate.infrequent
        if device_id in infrequent:
            self.state.electorate.infrequent = {
                name: vote for name, vote in infrequent.items() if name != device_id
            }
