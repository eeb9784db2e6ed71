//! GPUs: their driver, libcuda, and the two ways to register their memory with a card.

use super::finding::{Check, CheckResult, Finding, abbreviated};
use super::host::{ExaminedHost, Unreadable};
use super::kernel;
use super::pci::PciFunction;

const VERSION: &str = "/proc/driver/nvidia/version";
const CUDA: &str = "libcuda.so.1";
const CACHE: &str = "/etc/ld.so.cache";
/// The directories of libraries that the linker's cache does not list.
const DIRECTORIES: [&str; 4] =
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];

const NVIDIA: u32 = 0x10de;
/// The PCI base class of displays.
const DISPLAY: u32 = 0x03;
/// The first driver with open kernel modules, which support DMA-BUF (NVIDIA's documentation of GPUDirect RDMA).
const OPEN_SINCE: u32 = 515;

const NO_GPU: &str = "no NVIDIA GPU";

/// NVIDIA's kernel modules.
struct Driver {
    version: String,
    major: u32,
    is_open: bool,
}

impl Driver {
    fn read(host: &ExaminedHost) -> Result<Option<Self>, Unreadable> {
        host.parsed(VERSION, |text| {
            let line = text.lines().next()?;
            let is_number =
                |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
            let version = line.split_whitespace().find(is_number)?.to_owned();
            let major = version.split('.').next()?.parse().ok()?;
            Some(Self { version, major, is_open: line.contains("Open Kernel Module") })
        })
    }

    fn description(&self) -> String {
        format!("{}, {} kernel modules", self.version, if self.is_open { "open" } else { "closed" })
    }
}

/// Checks whether the GPUs have their driver.
pub fn driver(check: Check, host: &ExaminedHost) -> CheckResult {
    if let Some(driver) = Driver::read(host)? {
        return Ok(vec![check.ok(driver.description())]);
    }
    let is_gpu = |function: &PciFunction| function.vendor == NVIDIA && function.class >> 16 == DISPLAY;
    let idle: Vec<_> = PciFunction::all(host)?.into_iter().filter(is_gpu).map(|gpu| gpu.address).collect();
    match (idle.is_empty(), host.has_gpu()) {
        (true, false) => Ok(vec![check.skipped(NO_GPU)]),
        (true, true) => Ok(vec![check.warning(
            format!("a GPU is present, but {VERSION} is missing"),
            "it is unknown how its memory can be registered",
            "give the container the host's /proc/driver/nvidia",
        )]),
        (false, _) => Ok(vec![check.problem(
            format!("{} GPUs without NVIDIA's driver: {}", idle.len(), abbreviated(&idle)),
            "no GPU memory can be used",
            "install the driver, its open kernel modules, and modprobe nvidia",
        )]),
    }
}

/// Checks whether CUDA's library is present. The check does not open it.
pub fn libcuda(check: Check, host: &ExaminedHost) -> CheckResult {
    let found = find_cuda(host)?;
    Ok(vec![match (found, host.has_gpu()) {
        (Some(path), true) => check.ok(path),
        (Some(path), false) => check.skipped(format!("{NO_GPU}; {path} is present")),
        (None, false) => check.skipped(format!("{NO_GPU}, and no {CUDA}")),
        (None, true) => check.warning(
            format!("the dynamic linker does not find {CUDA}"),
            "no program on this host can use the GPU",
            "install the driver's user part, or run the container with NVIDIA's runtime (--gpus all)",
        ),
    }])
}

fn find_cuda(host: &ExaminedHost) -> Result<Option<String>, Unreadable> {
    let named = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let named = named.split(':').filter(|directory| directory.starts_with('/'));
    let mut beside = named.chain(DIRECTORIES).map(|directory| format!("{directory}/{CUDA}"));
    if let Some(path) = beside.find(|path| host.has(path)) {
        return Ok(Some(path));
    }
    // The end of the cache has zero-terminated strings, with the paths among them (ldconfig(8)).
    let cache = host.bytes(CACHE)?.unwrap_or_default();
    let ending = format!("/{CUDA}");
    let path = cache.split(|byte| *byte == 0).find(|string| string.ends_with(ending.as_bytes()));
    let path = path.map(|path| String::from_utf8_lossy(path).into_owned());
    Ok(path.filter(|path| path.starts_with('/') && host.has(path)))
}

/// Checks whether GPU memory can be registered as a DMA-BUF.
pub fn dma_buf(check: Check, host: &ExaminedHost) -> CheckResult {
    Ok(vec![match DmaBufSupport::of(host)? {
        DmaBufSupport::NoGpu => check.skipped(NO_GPU),
        DmaBufSupport::Possible(description) => check.ok(description),
        DmaBufSupport::Impossible(why) if !host.has_cards() => without_card(check, &why),
        DmaBufSupport::Impossible(why) => check.warning(
            why,
            "GPU memory can be registered with nvidia_peermem only",
            "use Linux 5.12 or later, and the open kernel modules of driver 515 or later",
        ),
    }])
}

/// Checks whether GPU memory can be registered by its address.
pub fn peermem(check: Check, host: &ExaminedHost) -> CheckResult {
    let other = match DmaBufSupport::of(host)? {
        DmaBufSupport::NoGpu => return Ok(vec![check.skipped(NO_GPU)]),
        other => other,
    };
    if host.has("/sys/module/nvidia_peermem") {
        return Ok(vec![check.ok("nvidia_peermem is loaded")]);
    }
    Ok(vec![match other {
        DmaBufSupport::Possible(_) => check.ok("nvidia_peermem is not loaded and not needed: DMA-BUF works"),
        _ if !host.has_cards() => without_card(check, "nvidia_peermem is not loaded"),
        _ => check.problem(
            "nvidia_peermem is not loaded, and DMA-BUF does not work",
            "GPU memory cannot be registered with a card",
            "run modprobe nvidia_peermem, or fix the finding of dma-buf",
        ),
    }])
}

fn without_card(check: Check, why: &str) -> Finding {
    check.skipped(format!("{why}; no card to register GPU memory with"))
}

/// Whether GPU memory can be registered by a DMA-BUF file descriptor.
enum DmaBufSupport {
    NoGpu,
    Possible(String),
    Impossible(String),
}

impl DmaBufSupport {
    fn of(host: &ExaminedHost) -> Result<Self, Unreadable> {
        let Some(driver) = Driver::read(host)? else {
            return Ok(match host.has_gpu() {
                true => Self::Impossible("the driver's version is unknown".to_owned()),
                false => Self::NoGpu,
            });
        };
        let kernel = kernel::version(host)?;
        let mut lacking = Vec::new();
        if !driver.is_open || driver.major < OPEN_SINCE {
            lacking.push(format!("driver {}", driver.description()));
        }
        if kernel.is_none_or(|version| version < kernel::DMA_BUF) {
            lacking.push(kernel::description(kernel));
        }
        Ok(match lacking.is_empty() {
            true => {
                Self::Possible(format!("{}, driver {}", kernel::description(kernel), driver.description()))
            }
            false => Self::Impossible(lacking.join(", ")),
        })
    }
}

/// The ways to register GPU memory: the reason why each works, or why it does not.
pub struct GpuRegistration {
    pub dma_buf: Result<String, String>,
    pub peermem: Result<String, String>,
}

impl GpuRegistration {
    /// The ways of a host.
    pub fn of(host: &ExaminedHost) -> Self {
        let dma_buf = match DmaBufSupport::of(host) {
            Ok(DmaBufSupport::Possible(description)) => Ok(description),
            Ok(DmaBufSupport::Impossible(why)) => Err(why),
            Ok(DmaBufSupport::NoGpu) => Err(NO_GPU.to_owned()),
            Err(file) => Err(file.to_string()),
        };
        let peermem = match host.has("/sys/module/nvidia_peermem") {
            true => Ok("the module is loaded".to_owned()),
            false => Err("the module is not loaded; run modprobe nvidia_peermem".to_owned()),
        };
        Self { dma_buf, peermem }
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::super::host::fake::Fake;
    use super::*;

    const OPEN: &str =
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build  (x@y)\n";
    const CLOSED: &str =
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n";

    fn host(driver: &str, kernel: &str) -> Fake {
        Fake::new(&[(VERSION, driver), ("/proc/sys/kernel/osrelease", kernel)])
    }

    fn level(check: fn(Check, &ExaminedHost) -> CheckResult, fake: &Fake) -> Level {
        check(Check("it"), fake).expect("readable")[0].level
    }

    #[test]
    fn without_a_gpu_all_is_skipped() {
        for check in [driver, libcuda, dma_buf, peermem] {
            assert_eq!(level(check, &Fake::new(&[])), Level::Skipped);
        }
    }

    #[test]
    fn dma_buf_needs_open_modules_and_a_new_kernel() {
        for (modules, release, possible) in [
            (OPEN, "6.1.0-18-amd64\n", true),
            (OPEN, "5.12.0\n", true),
            (OPEN, "5.11.22\n", false),
            (CLOSED, "6.1.0\n", false),
            (&OPEN.replace("535", "510"), "6.1.0\n", false),
        ] {
            let fake = host(modules, release).card("mlx5_0");
            let expected = if possible { [Level::Ok, Level::Ok] } else { [Level::Warning, Level::Problem] };
            assert_eq!([level(dma_buf, &fake), level(peermem, &fake)], expected, "{modules}{release}");
            let loaded = fake.with("/sys/module/nvidia_peermem/version", b"");
            assert_eq!(level(peermem, &loaded), Level::Ok);
        }
        let cardless = host(CLOSED, "6.1.0\n");
        assert_eq!([level(dma_buf, &cardless), level(peermem, &cardless)], [Level::Skipped; 2]);
    }

    #[test]
    fn missing_and_malformed_drivers() {
        let of = |file: &str| format!("/sys/bus/pci/devices/0000:04:00.0/{file}");
        let idle =
            Fake::new(&[(&of("vendor"), "0x10de"), (&of("device"), "0x2335"), (&of("class"), "0x030200")]);
        assert_eq!(level(driver, &idle), Level::Problem);
        assert_eq!(level(driver, &Fake::new(&[("/dev/nvidiactl", "")])), Level::Warning);
        let said = driver(Check("it"), &host("NVRM version: none\n", "6.1")).unwrap_err().to_string();
        assert!(said.contains(VERSION), "{said}");
        assert_eq!(level(driver, &host(OPEN, "6.1.0")), Level::Ok);
    }

    #[test]
    fn cuda_is_found_by_cache_and_directory() {
        let gpu = || host(OPEN, "6.1.0");
        assert_eq!(level(libcuda, &gpu()), Level::Warning);
        assert_eq!(level(libcuda, &gpu().with("/usr/lib64/libcuda.so.1", b"")), Level::Ok);
        let cached =
            gpu().with(CACHE, b"glibc-ld.so.cache1.1\0\x02\0libcuda.so.1\0/opt/gpu/libcuda.so.1\0rest");
        assert_eq!(level(libcuda, &cached), Level::Warning, "in the cache, but missing");
        assert_eq!(level(libcuda, &cached.with("/opt/gpu/libcuda.so.1", b"")), Level::Ok);
    }
}
