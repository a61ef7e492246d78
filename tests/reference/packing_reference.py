"""First-fit decreasing by its definition, in plain loops."""

from __future__ import annotations


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Take the longest that is left (of equals the first) and put it where it first fits."""
    left = list(range(len(lengths)))
    packs: list[list[int]] = []
    while left:
        longest = left[0]
        for index in left:
            if lengths[index] > lengths[longest]:
                longest = index
        left.remove(longest)
        for pack in packs:
            if sum(lengths[i] for i in pack) + lengths[longest] <= capacity:
                pack.append(longest)
                break
        else:
            packs.append([longest])
    return packs
