//! The hosts that can be impersonated.

use backend_loopback::LinkModel;

use crate::failure::{CommandResult, Failure};

/// A profile's name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Name {
    /// AWS p5.48xlarge: 8 rail groups of 4 EFA cards of 100 Gbps
    P5,
    /// One GPU with 2 EFA cards of 200 Gbps, as fabric-lib's published figures have it
    Efa2x200,
}

/// A host: its rail groups and their cards.
#[derive(Debug, Clone)]
pub struct Profile {
    /// Rail groups, each driven by one engine.
    pub groups: u32,
    /// Cards of a group.
    pub cards: u32,
    /// Cards that the first group lacks.
    pub lost_cards: u32,
    /// Cards of each of the other host's groups, where they are not as many.
    pub remote_cards: Option<u32>,
    /// One card.
    pub card: LinkModel,
    /// Seed of the cards' dice.
    pub seed: u64,
}

impl Profile {
    /// The profile of that name.
    pub fn named(name: Name) -> Self {
        let p5 = LinkModel::p5();
        match name {
            Name::P5 => Self { groups: 8, cards: 4, lost_cards: 0, remote_cards: None, card: p5, seed: 1 },
            Name::Efa2x200 => {
                // 364 Gbps was published for pages of 64 KiB over both cards. At 1 and 16 KiB
                // the processor was the limit there: these cards take any number of requests.
                let card = LinkModel { bits_per_s: Some(182_000_000_000), ops_per_s: None, ..p5 };
                Self { groups: 1, cards: 2, lost_cards: 0, remote_cards: None, card, seed: 1 }
            }
        }
    }

    /// Refuses what makes no sense.
    pub fn check(&self) -> CommandResult {
        if self.groups == 0 || self.groups > 64 || self.cards == 0 || self.cards > 64 {
            return Err(Failure::new("--groups and --cards are between 1 and 64"));
        }
        if self.remote_cards.is_some_and(|cards| cards == 0 || cards > 64) {
            return Err(Failure::new("--remote-cards is between 1 and 64"));
        }
        if self.lost_cards >= self.cards {
            return Err(Failure::new(format!(
                "--lost-cards is below --cards: the first group has {} cards",
                self.cards
            )));
        }
        if self.card.bits_per_s.is_none_or(|rate| rate == 0) {
            return Err(Failure::new("--card-gbps is more than 0"));
        }
        Ok(())
    }

    /// Cards of group `group`.
    pub fn cards_of(&self, group: u32) -> u32 {
        if group == 0 { self.cards - self.lost_cards } else { self.cards }
    }

    /// Cards of group `group` of the other host.
    pub fn remote_cards_of(&self, group: u32) -> u32 {
        self.remote_cards.unwrap_or_else(|| self.cards_of(group))
    }

    /// Cards of the whole host.
    pub fn all_cards(&self) -> u32 {
        (0..self.groups).map(|group| self.cards_of(group)).sum()
    }

    /// Payload that all cards together can carry, in Gbps: those of the side with fewer.
    pub fn ceiling_gbps(&self) -> f64 {
        let cards = |group: u32| self.cards_of(group).min(self.remote_cards_of(group));
        f64::from((0..self.groups).map(cards).sum::<u32>()) * self.card.bits_per_s.unwrap_or(0) as f64 / 1e9
    }
}
