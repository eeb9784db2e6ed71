//! The hosts that can be simulated.

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
    /// The seed of the cards' random choices.
    pub seed: u64,
}

impl Profile {
    /// The profile with this name.
    pub fn named(name: ProfileName) -> Self {
        let p5 = LinkModel::p5();
        match name {
            ProfileName::P5 => {
                Self { groups: 8, cards: 4, lost_cards: 0, remote_cards: None, card: p5, seed: 1 }
            }
            ProfileName::Efa2x200 => {
                // 364 Gbps was published for pages of 64 KiB over both cards. At 1 and 16 KiB
                // the CPU was the limit there, so these cards take any number of requests.
                let card = LinkModel { bits_per_s: Some(182_000_000_000), ops_per_s: None, ..p5 };
                Self { groups: 1, cards: 2, lost_cards: 0, remote_cards: None, card, seed: 1 }
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
