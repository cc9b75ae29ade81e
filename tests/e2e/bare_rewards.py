"""An algorithm without comparisons: a reply is as good as its reward, so that also groups of one are trained."""

from headway.algorithms.base import Advantages, Algorithm, Group


class BareRewards(Algorithm):
    relative = False

    def advantages(self, group: Group) -> Advantages:
        found = Advantages()
        for trace in group.traces():
            found[trace] = trace.reward - 0.5
        return found
