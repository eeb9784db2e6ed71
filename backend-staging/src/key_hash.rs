//! A hash function for tables by keys of regions.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// A hash function for keys: the product with an odd random number (multiply-shift hashing: Dietzfelbinger and others,
/// 1997), so that a peer that chooses keys does not know which ones collide. Each run of pages looks its region up at
/// both ends, and the standard library's function takes 400 instructions for it.
#[derive(Debug, Clone)]
pub(crate) struct KeyHash {
    multiplier: u64,
}

impl Default for KeyHash {
    fn default() -> Self {
        Self { multiplier: RandomState::new().hash_one(0) | 1 }
    }
}

impl BuildHasher for KeyHash {
    type Hasher = KeyHasher;

    fn build_hasher(&self) -> KeyHasher {
        KeyHasher { multiplier: self.multiplier, hash: 0 }
    }
}

/// The hash of one key.
pub(crate) struct KeyHasher {
    multiplier: u64,
    hash: u64,
}

impl Hasher for KeyHasher {
    fn write_u64(&mut self, key: u64) {
        let product = (self.hash ^ key).wrapping_mul(self.multiplier);
        // The table uses bits of both halves.
        self.hash = product ^ (product >> 32);
    }

    fn write_u32(&mut self, key: u32) {
        self.write_u64(key.into());
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn finish(&self) -> u64 {
        self.hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_of_neighbours_differ_in_both_halves() {
        let hash = KeyHash::default();
        let all: Vec<_> = (0..64_u64).map(|key| hash.hash_one((7_u32, key << 12))).collect();
        let distinct =
            |of: fn(&u64) -> u64| all.iter().map(of).collect::<std::collections::HashSet<_>>().len();
        assert!(distinct(|hash| hash & 0xffff) > 32 && distinct(|hash| hash >> 57) > 8, "{all:x?}");
        assert_eq!(all[1], hash.hash_one((7_u32, 1_u64 << 12)));
    }
}
