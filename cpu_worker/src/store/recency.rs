//! The order in which frames were used: a list through an array, so that a use costs a few stores and no allocation.

use kvsluice_layout::ids::SourceBlock;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

/// Frames from the least to the most recently used.
#[derive(Debug)]
pub(super) struct Recency {
    links: Vec<Link>,
    oldest: u32,
    newest: u32,
}

impl Recency {
    /// The frames of `blocks`, all below `frames`, as if used in this order.
    pub(super) fn new(blocks: impl Iterator<Item = SourceBlock>, frames: u32) -> Self {
        let unlinked = Link {
            older: NONE,
            newer: NONE,
        };
        let mut recency = Self {
            links: vec![unlinked; frames as usize],
            oldest: NONE,
            newest: NONE,
        };
        blocks.for_each(|block| recency.append(block.get()));
        recency
    }

    /// Makes `block`, which is in the list, the most recently used.
    pub(super) fn touch(&mut self, block: SourceBlock) {
        let at = block.get();
        if self.newest == at {
            return;
        }
        let Some(&Link { older, newer }) = self.links.get(block.index()) else {
            return;
        };
        match self.links.get_mut(older as usize) {
            Some(link) => link.newer = newer,
            None => self.oldest = newer,
        }
        if let Some(link) = self.links.get_mut(newer as usize) {
            link.older = older;
        }
        self.append(at);
    }

    /// Every frame of the list, the least recently used first.
    pub(super) fn oldest_first(&self) -> impl Iterator<Item = SourceBlock> {
        let first = (self.oldest != NONE).then_some(self.oldest);
        std::iter::successors(first, |at| {
            self.links
                .get(*at as usize)
                .map(|link| link.newer)
                .filter(|at| *at != NONE)
        })
        .map(SourceBlock)
    }

    fn append(&mut self, at: u32) {
        let newest = std::mem::replace(&mut self.newest, at);
        match self.links.get_mut(newest as usize) {
            Some(link) => link.newer = at,
            None => self.oldest = at,
        }
        if let Some(link) = self.links.get_mut(at as usize) {
            *link = Link {
                older: newest,
                newer: NONE,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frame_that_was_not_used_for_longest_comes_first() {
        let blocks = [3, 1, 4].map(SourceBlock);
        let mut recency = Recency::new(blocks.into_iter(), 6);
        let order = |recency: &Recency| recency.oldest_first().map(SourceBlock::get).collect::<Vec<_>>();
        assert_eq!(order(&recency), [3, 1, 4]);
        for (used, left) in [(4, [3, 1, 4]), (3, [1, 4, 3]), (4, [1, 3, 4]), (1, [3, 4, 1])] {
            recency.touch(SourceBlock(used));
            assert_eq!(order(&recency), left, "after {used}");
        }
    }
}
