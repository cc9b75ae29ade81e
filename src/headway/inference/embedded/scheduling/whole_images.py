"""Images whose tokens see each other in both directions: no step and no cached prefix ends inside of one."""

from headway.inference.embedded.scheduling.sequence import Sequence


class WholeImages:
    """Keeps the ends of steps and of cached prefixes, which are whole blocks of `block_size` tokens, out of images."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def limit(self, sequence: Sequence, count: int) -> int:
        """Bound the tokens of a step so that it ends before an image that it would cut. A step that begins with the
        image takes all of it, even if these are more than `count`: it would never fit otherwise."""
        start = sequence.computed
        for image in sequence.images if count > 0 else ():
            first, end = image.use.at, image.use.at + image.use.tokens
            if first < start + count < end:
                return first - start if first > start else end - start
        return count

    def whole_blocks(self, sequence: Sequence, blocks: int) -> int:
        """Count those of the first `blocks` of a sequence that can be taken up."""
        for image in reversed(sequence.images):
            first, end = image.use.at, image.use.at + image.use.tokens
            if first < blocks * self._block_size < end:
                blocks = first // self._block_size
        return blocks
