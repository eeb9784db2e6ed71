//! Directories of files: a folder that members write to, or a static list.

mod calls;
mod folder;
mod name;
mod static_list;

use calls::BlockingCalls;
pub use folder::FolderStore;
use name::{from_file_name, to_file_name};
pub use static_list::StaticList;
