//! The hosts that can be simulated.

use std::time::Duration;

use backend_loopback::LinkModel;

use crate::failure::{CommandFailure, CommandResult};

/// A profile's name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProfileName {
    /// AWS p5.48xlarge: 8 rail groups of 4 EFA cards of 100 Gbps
    P5,
    /// One GPU with 2 EFA cards of 200 Gbps, as in fabric-lib's published figures
    Efa2x200,
    /// AWS p5en.48xlarge: 8 rail groups of 2 EFA cards of 200 Gbps
    P5en,
    /// 8 rail groups of one ConnectX-7 of 400 Gbps
    Cx7,
}

/// The rail groups and cards of a host.
#[derive(Debug, Clone)]
pub struct Profile {
    /// The number of rail groups. One engine drives each.
    pub groups: u32,
    /// The number of cards of a group.
    pub cards: u32,
    /// The number of missing cards of the first group.
    pub lost_cards: u32,
    /// The number of cards of each group of the other host, if it differs.
    pub remote_cards: Option<u32>,
    /// The model of a card.
    pub card: LinkModel,
    /// The entries of a card's gather list. 1: it has none.
    pub gather_entries: u32,
    /// The seed of the cards' random choices.
    pub seed: u64,
}

impl Profile {
    /// The profile with this name.
    pub fn named(name: ProfileName) -> Self {
        let p5 = LinkModel::p5();
        // 364 Gbps was published for pages of 64 KiB over two cards of 200 Gbps (fabric-lib), and 366 GB/s for the 16
        // cards of a p5en (Mooncake).
        let efa200 = LinkModel { bits_per_s: Some(182_000_000_000), ..p5.clone() };
        let of = |groups, cards, card| Self {
            groups,
            cards,
            lost_cards: 0,
            remote_cards: None,
            card,
            gather_entries: 1,
            seed: 1,
        };
        match name {
            ProfileName::P5 => of(8, 4, p5),
            // At 1 and 16 KiB the CPU was the limit there, so these cards take any number of requests.
            ProfileName::Efa2x200 => of(1, 2, LinkModel { ops_per_s: None, ..efa200 }),
            // 2.11 million requests a second over two cards is the highest published rate (fabric-lib). The cards' own
            // limit is not known.
            ProfileName::P5en => of(8, 2, LinkModel { ops_per_s: Some(1_055_000), ..efa200 }),
            // 370 Gbps at 64 KiB and 11.1 million requests a second at 1 KiB (fabric-lib, one card). 3 µs is a round
            // figure for one way. mlx5's `max_sge` is 30.
            ProfileName::Cx7 => {
                let card = LinkModel {
                    reorder: false,
                    latency: Duration::from_micros(3),
                    jitter: Duration::ZERO,
                    bits_per_s: Some(370_000_000_000),
                    ops_per_s: Some(11_100_000),
                    ..p5
                };
                Self { gather_entries: 30, ..of(8, 1, card) }
            }
        }
    }

    /// Fails if a value is invalid.
    pub fn check(&self) -> CommandResult {
        if self.groups == 0 || self.groups > 64 || self.cards == 0 || self.cards > 64 {
            return Err(CommandFailure::new("--groups and --cards must be between 1 and 64"));
        }
        if self.remote_cards.is_some_and(|cards| cards == 0 || cards > 64) {
            return Err(CommandFailure::new("--remote-cards must be between 1 and 64"));
        }
        if self.lost_cards >= self.cards {
            return Err(CommandFailure::new(format!(
                "--lost-cards must be less than the {} cards of the first group",
                self.cards
            )));
        }
        if self.card.bits_per_s.is_none_or(|rate| rate == 0) {
            return Err(CommandFailure::new("--card-gbps must be more than 0"));
        }
        Ok(())
    }

    /// The number of cards of group `group`.
    pub fn cards_of(&self, group: u32) -> u32 {
        if group == 0 { self.cards - self.lost_cards } else { self.cards }
    }

    /// The number of cards of group `group` on the other host.
    pub fn remote_cards_of(&self, group: u32) -> u32 {
        self.remote_cards.unwrap_or_else(|| self.cards_of(group))
    }

    /// The number of cards of the host.
    pub fn all_cards(&self) -> u32 {
        (0..self.groups).map(|group| self.cards_of(group)).sum()
    }

    /// The payload that all cards can carry, in Gbps, limited by the side with fewer cards.
    pub fn ceiling_gbps(&self) -> f64 {
        let cards = |group: u32| self.cards_of(group).min(self.remote_cards_of(group));
        f64::from((0..self.groups).map(cards).sum::<u32>()) * self.card.bits_per_s.unwrap_or(0) as f64 / 1e9
    }
}
