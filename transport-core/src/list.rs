//! Lists: entries of many regions, chosen by index, and the plans of transfers between two lists.

mod entries;
mod planner;
mod region_list;
mod selection;

pub(crate) use planner::plan;
pub use region_list::{LocalList, RegionList, RemoteList};
pub use selection::Selection;
