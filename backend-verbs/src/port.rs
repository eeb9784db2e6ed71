//! A port of a card: its state, its rate and its addresses.

use multirail_spi::Result;
use rdma_sys as ib;

use crate::device::Device;
use crate::gid::{Gid, GidType};
use crate::objects::library;
use crate::status::os_error;

/// `IBV_QPF_GRH_REQUIRED` of `infiniband/verbs_api.h`: a macro that bindgen leaves out.
const GRH_REQUIRED: u8 = 1;

/// A port, as it was at the query.
pub(crate) struct Port {
    pub(crate) number: u8,
    pub(crate) attr: ib::ibv_port_attr,
}

impl Port {
    pub(crate) fn query(device: &Device, number: u8) -> Result<Self> {
        let library = library()?;
        // SAFETY: zero is a value of the structure, also for fields that an older library does not write.
        let (attr, code) = unsafe {
            let mut attr: ib::ibv_port_attr = std::mem::zeroed();
            let code = library.query_port(device.context.as_ptr(), number, &raw mut attr);
            (attr, code)
        };
        match code {
            0 => Ok(Self { number, attr }),
            code => Err(os_error("open", &format!("to tell of port {number}"), code)),
        }
    }

    pub(crate) fn is_active(&self) -> bool {
        self.attr.state == ib::IBV_PORT_ACTIVE
    }

    pub(crate) fn is_ethernet(&self) -> bool {
        u32::from(self.attr.link_layer) == ib::IBV_LINK_LAYER_ETHERNET
    }

    /// Whether only GIDs address the port: on Ethernet, and for virtual functions of InfiniBand without a LID.
    pub(crate) fn needs_grh(&self) -> bool {
        self.is_ethernet() || self.attr.flags & GRH_REQUIRED != 0
    }

    /// The bits per second of all lanes (`active_speed` and `active_width`, ibv_query_port(3)).
    pub(crate) fn rate(&self) -> Option<u64> {
        // In tenths of Gbit/s per lane, without the encoding.
        let lane = match self.attr.active_speed {
            1 => 20,
            2 => 40,
            4 | 8 => 80,
            16 => 136,
            32 => 250,
            64 => 500,
            128 => 1000,
            _ => return None,
        };
        let lanes = match self.attr.active_width {
            1 => 1,
            2 => 4,
            4 => 8,
            8 => 12,
            16 => 2,
            _ => return None,
        };
        Some(lane * lanes * 100_000_000)
    }

    /// The GIDs of the port.
    pub(crate) fn gids(&self, device: &Device) -> Result<Vec<Gid>> {
        let library = library()?;
        // SAFETY: zero is a value of the structure.
        let entry: ib::ibv_gid_entry = unsafe { std::mem::zeroed() };
        let room = usize::try_from(self.attr.gid_tbl_len).unwrap_or(0).max(1)
            * usize::from(device.limits.phys_port_cnt);
        let mut entries = vec![entry; room];
        let into = entries.as_mut_ptr();
        // SAFETY: the table has room for `room` entries of the given size.
        let count = unsafe {
            library.query_gid_table(device.context.as_ptr(), into, room, 0, size_of::<ib::ibv_gid_entry>())
        };
        let Ok(count) = usize::try_from(count) else {
            return Err(os_error("open", "to tell its GIDs", -count as i32));
        };
        let ours = entries[..count].iter().filter(|entry| entry.port_num == u32::from(self.number));
        let gid = |entry: &ib::ibv_gid_entry| {
            let wire = match entry.gid_type {
                ib::IBV_GID_TYPE_ROCE_V2 => GidType::RoceV2,
                ib::IBV_GID_TYPE_ROCE_V1 => GidType::RoceV1,
                _ => GidType::InfiniBand,
            };
            // SAFETY: both views of the union are 16 bytes.
            Some(Gid { index: u8::try_from(entry.gid_index).ok()?, bytes: unsafe { entry.gid.raw }, wire })
        };
        Ok(ours.filter_map(gid).collect())
    }
}
