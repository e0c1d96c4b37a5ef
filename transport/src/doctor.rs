//! What on this host would stand in the way, and what to change (X32).
//!
//! Every check reads files of the kernel below two roots, so that a test can show it a host that it does not run on.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, access, statat, statfs};
use rustix::process::{Resource, getrlimit};

use crate::limits::Kernel;
use crate::peers::{Peers, own_uid};
use crate::runtime_dir::RuntimeDir;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Health {
    /// As it should be.
    Fine,
    /// It works, but less well or with less protection.
    Limited,
    /// It will not work.
    Broken,
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fine => "fine",
            Self::Limited => "limited",
            Self::Broken => "broken",
        })
    }
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at: `memory`, `locked memory`, `/dev/shm`, …
    pub subject: &'static str,
    /// How it is.
    pub health: Health,
    /// What was found, with numbers.
    pub found: String,
    /// What to change; empty where nothing is to be.
    pub remedy: String,
}

/// What the user is going to run, as far as the checks depend on it.
#[derive(Clone, Debug, Default)]
pub struct Plans {
    /// Bytes of all segments together.
    pub segment_bytes: u64,
    /// Size of the huge pages that are asked for.
    pub huge_page_bytes: Option<u64>,
    /// The NUMA node that is asked for.
    pub numa_node: Option<u32>,
    /// The folder for named segments, where the persistent mode is asked for.
    pub persist: Option<PathBuf>,
    /// The runtime folder.
    pub runtime_dir: PathBuf,
    /// True where a CUDA device is to be used.
    pub cuda: bool,
}

/// Looks at the host. Changes nothing on it, but for the runtime folder, which is made if it is not there.
pub fn examine(kernel: &Kernel, plans: &Plans) -> Vec<Finding> {
    let mut findings = vec![
        kernel_version(kernel),
        memory(kernel, plans),
        locked_memory(plans),
        runtime_folder(plans),
        numa(kernel, plans),
        namespaces(kernel),
        proc_folder(kernel),
    ];
    findings.extend(plans.persist.as_deref().map(|folder| named_segments(folder, plans)));
    findings.extend(
        plans
            .huge_page_bytes
            .map(|page_bytes| huge_pages(kernel, plans, page_bytes)),
    );
    findings.extend(plans.cuda.then(|| driver(kernel)));
    findings
}

fn finding(subject: &'static str, health: Health, found: String, remedy: impl Into<String>) -> Finding {
    Finding {
        subject,
        health,
        found,
        remedy: if health == Health::Fine {
            String::new()
        } else {
            remedy.into()
        },
    }
}

fn kernel_version(kernel: &Kernel) -> Finding {
    let release = fs::read_to_string(kernel.proc.join("sys/kernel/osrelease")).unwrap_or_default();
    let release = release.trim();
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let (health, remedy) = match version {
        (0, _) => (Health::Limited, "the kernel does not tell its version"),
        old if old < (5, 14) => (Health::Broken, "Linux 5.14 or later is needed (MADV_POPULATE_WRITE)"),
        old if old < (5, 16) => (
            Health::Limited,
            "before Linux 5.16 a producer looks at its ranks every millisecond",
        ),
        old if old < (6, 5) => (
            Health::Limited,
            "before Linux 6.5 a peer's death is proven by its pid and role lock",
        ),
        _ => (Health::Fine, ""),
    };
    finding("kernel", health, format!("Linux {release}"), remedy)
}

fn memory(kernel: &Kernel, plans: &Plans) -> Finding {
    let Some(limit) = kernel.tightest_memory() else {
        return finding(
            "memory",
            Health::Limited,
            "no limit can be read".into(),
            "mount /proc and /sys",
        );
    };
    let found = format!(
        "{} leaves {} of {} bytes, {} are needed",
        limit.name, limit.free_bytes, limit.limit_bytes, plans.segment_bytes
    );
    let short = plans.huge_page_bytes.is_none() && limit.free_bytes < plans.segment_bytes;
    let health = if short { Health::Broken } else { Health::Fine };
    finding("memory", health, found, "raise that limit or shrink the pool")
}

fn locked_memory(plans: &Plans) -> Finding {
    let limit = getrlimit(Resource::Memlock).current;
    let found = match limit {
        None => "unlimited".into(),
        Some(bytes) => format!("{bytes} bytes, {} are needed", plans.segment_bytes),
    };
    // The CUDA driver pins without asking for this limit; other drivers may ask.
    let short = limit.is_some_and(|bytes| bytes < plans.segment_bytes);
    let health = if short { Health::Limited } else { Health::Fine };
    let remedy = "raise it (ulimit -l unlimited; in a container --ulimit memlock=-1) if registering memory fails";
    finding("locked memory", health, found, remedy)
}

fn named_segments(folder: &Path, plans: &Plans) -> Finding {
    const SUBJECT: &str = "persistent segments";
    let place = match statfs(folder) {
        Ok(place) => place,
        Err(error) => {
            let found = format!("{}: {}", folder.display(), std::io::Error::from(error));
            return finding(
                SUBJECT,
                Health::Broken,
                found,
                "make the folder, below /dev/shm, mode 0700",
            );
        }
    };
    if !crate::segment::is_memory(&place) {
        let found = format!("{} is on a disk", folder.display());
        return finding(
            SUBJECT,
            Health::Broken,
            found,
            "give --persist a folder on tmpfs (/dev/shm) or hugetlbfs",
        );
    }
    let bytes = |blocks: u64| blocks.saturating_mul(u64::try_from(place.f_bsize).unwrap_or(0));
    let (free, total) = (bytes(place.f_bavail), bytes(place.f_blocks));
    let found = format!(
        "{} has {free} of {total} bytes free, {} are needed",
        folder.display(),
        plans.segment_bytes
    );
    // A file system of size 0 has no limit of its own.
    let short = total > 0 && free < plans.segment_bytes;
    let health = if short { Health::Broken } else { Health::Fine };
    finding(
        SUBJECT,
        health,
        found,
        "mount -o remount,size=... it; in a container --shm-size",
    )
}

fn huge_pages(kernel: &Kernel, plans: &Plans, page_bytes: u64) -> Finding {
    const SUBJECT: &str = "huge pages";
    let needed = plans.segment_bytes.div_ceil(page_bytes.max(1));
    let Some(free) = kernel.free_huge_pages(page_bytes) else {
        let found = format!("none of {page_bytes} bytes on this kernel");
        return finding(SUBJECT, Health::Broken, found, "run without huge pages");
    };
    let found = format!("{free} of {page_bytes} bytes are free, {needed} are needed");
    let health = if free < needed { Health::Broken } else { Health::Fine };
    let kib = page_bytes / 1024;
    let remedy = format!("echo {needed} > /sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages, early after boot");
    finding(SUBJECT, health, found, remedy)
}

fn numa(kernel: &Kernel, plans: &Plans) -> Finding {
    let online = kernel.numa_nodes();
    let Some(node) = plans.numa_node else {
        let several = online != "0";
        let health = if several { Health::Limited } else { Health::Fine };
        let remedy = "bind the pool to the GPU's node with --numa-node";
        return finding("NUMA", health, format!("nodes {online}, none asked for"), remedy);
    };
    match kernel.node_free_bytes(node) {
        None => {
            let found = format!("node {node} is asked for, {online} are online");
            finding("NUMA", Health::Broken, found, "ask for a node that is online")
        }
        Some(free) => {
            let found = format!("node {node} has {free} bytes free, {} are needed", plans.segment_bytes);
            let health = if free < plans.segment_bytes {
                Health::Broken
            } else {
                Health::Fine
            };
            finding("NUMA", health, found, "take another node or shrink the pool")
        }
    }
}

fn runtime_folder(plans: &Plans) -> Finding {
    let path = plans.runtime_dir.display();
    match RuntimeDir::open(&plans.runtime_dir, &Peers::default()) {
        Ok(_) => finding(
            "runtime folder",
            Health::Fine,
            format!("{path}, for uid {}", own_uid()),
            "",
        ),
        Err(error) => {
            let remedy = "give --runtime-dir a folder of your own, mode 0700";
            finding("runtime folder", Health::Broken, error.to_string(), remedy)
        }
    }
}

/// X28: what is limited when the two sides do not see each other's pids or files.
fn namespaces(kernel: &Kernel) -> Finding {
    let own = |name: &str| fs::read_link(kernel.proc.join("self/ns").join(name)).ok();
    let first = |name: &str| fs::read_link(kernel.proc.join("1/ns").join(name)).ok();
    let status = fs::read_to_string(kernel.proc.join("self/status")).unwrap_or_default();
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let depth = pids.map_or(1, |pids| pids.split_whitespace().count());
    let container = ["pid", "mnt"]
        .iter()
        .any(|name| first(name).is_some() && own(name) != first(name));
    if depth > 1 || container {
        let remedy = "share the runtime folder between both sides' containers; share the pid namespace (docker \
                      --pid, shareProcessNamespace) if the producer is to expel hung workers";
        return finding(
            "namespaces",
            Health::Limited,
            format!("a container, {depth} pid namespaces deep"),
            remedy,
        );
    }
    finding("namespaces", Health::Fine, "one pid namespace".into(), "")
}

fn proc_folder(kernel: &Kernel) -> Finding {
    // Descriptors are reopened, and sockets with long names are reached, through /proc/self/fd.
    let there = statat(CWD, kernel.proc.join("self/fd"), AtFlags::empty()).is_ok();
    let health = if there { Health::Fine } else { Health::Broken };
    let found = if there {
        "/proc/self/fd is there"
    } else {
        "/proc/self/fd is not there"
    };
    finding("/proc", health, found.into(), "mount proc on /proc")
}

fn driver(kernel: &Kernel) -> Finding {
    const SUBJECT: &str = "CUDA driver";
    let version = fs::read_to_string(kernel.proc.join("driver/nvidia/version")).unwrap_or_default();
    let Some(version) = version.lines().next().filter(|line| !line.is_empty()) else {
        let remedy = "install the NVIDIA driver; in a container run with --gpus or the NVIDIA runtime";
        return finding(
            SUBJECT,
            Health::Broken,
            "no NVIDIA kernel module is loaded".into(),
            remedy,
        );
    };
    let gpus = fs::read_dir(kernel.proc.join("driver/nvidia/gpus")).map_or(0, |gpus| gpus.count());
    let usable = access(
        "/dev/nvidiactl",
        rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK,
    )
    .is_ok();
    let health = if gpus == 0 || !usable {
        Health::Broken
    } else {
        Health::Fine
    };
    let found = format!(
        "{version}; {gpus} GPUs; /dev/nvidiactl is {}usable",
        if usable { "" } else { "not " }
    );
    finding(
        SUBJECT,
        health,
        found,
        "give this process the GPU's device files (--gpus, or the group of /dev/nvidia*)",
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    struct Host {
        root: tempfile::TempDir,
        kernel: Kernel,
    }

    fn host(files: &[(&str, &str)]) -> Host {
        let root = tempfile::tempdir().unwrap();
        let kernel = Kernel {
            proc: root.path().join("proc"),
            sys: root.path().join("sys"),
        };
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Host { root, kernel }
    }

    fn plans(host: &Host) -> Plans {
        Plans {
            segment_bytes: 4 << 20,
            runtime_dir: host.root.path().join("run"),
            ..Plans::default()
        }
    }

    fn about(findings: &[Finding], subject: &str) -> (Health, String, String) {
        let found = findings
            .iter()
            .find(|finding| finding.subject == subject)
            .expect("the subject is looked at");
        (found.health, found.found.clone(), found.remedy.clone())
    }

    #[test]
    fn x32_this_host_is_examined_and_every_complaint_has_a_remedy() {
        let mut plans = plans(&host(&[]));
        let temp = tempfile::tempdir().unwrap();
        plans.runtime_dir = temp.path().join("run");
        plans.persist = Some("/dev/shm".into());
        plans.huge_page_bytes = Some(2 << 20);
        plans.cuda = true;
        let findings = examine(&Kernel::default(), &plans);
        assert_eq!(findings.len(), 10);
        for finding in &findings {
            assert_eq!(finding.remedy.is_empty(), finding.health == Health::Fine, "{finding:?}");
            assert!(!finding.found.is_empty());
        }
        assert_eq!(about(&findings, "/proc").0, Health::Fine);
        assert_eq!(about(&findings, "runtime folder").0, Health::Fine);
    }

    #[test]
    fn x32_a_host_with_too_little_is_told_what_to_change() {
        let host = host(&[
            ("proc/sys/kernel/osrelease", "5.10.0-9-amd64\n"),
            ("proc/meminfo", "MemTotal: 4096 kB\nMemAvailable: 1024 kB\n"),
            ("proc/self/status", "NSpid:\t4711\t7\n"),
            ("sys/devices/system/node/online", "0-1\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "1\n"),
        ]);
        let mut plans = plans(&host);
        fs::create_dir(&plans.runtime_dir).unwrap();
        fs::set_permissions(&plans.runtime_dir, PermissionsExt::from_mode(0o777)).unwrap();
        plans.huge_page_bytes = Some(2 << 20);
        plans.numa_node = Some(3);
        plans.persist = Some(env!("CARGO_MANIFEST_DIR").into());
        plans.cuda = true;
        let findings = examine(&host.kernel, &plans);
        let (health, found, remedy) = about(&findings, "kernel");
        assert_eq!((health, found.as_str()), (Health::Broken, "Linux 5.10.0-9-amd64"));
        assert!(remedy.contains("Linux 5.14 or later"), "{remedy}");
        // Small pages are not what the pool will take.
        assert_eq!(about(&findings, "memory").0, Health::Fine);
        let (health, found, remedy) = about(&findings, "huge pages");
        assert_eq!(
            (health, found.as_str()),
            (Health::Broken, "1 of 2097152 bytes are free, 2 are needed")
        );
        assert!(
            remedy.starts_with("echo 2 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"),
            "{remedy}"
        );
        let (health, found, _) = about(&findings, "NUMA");
        assert_eq!(
            (health, found.as_str()),
            (Health::Broken, "node 3 is asked for, 0-1 are online")
        );
        let (health, found, _) = about(&findings, "namespaces");
        assert_eq!(
            (health, found.as_str()),
            (Health::Limited, "a container, 2 pid namespaces deep")
        );
        let (health, found, _) = about(&findings, "persistent segments");
        assert!(health == Health::Broken && found.ends_with("is on a disk"), "{found}");
        let (health, found, remedy) = about(&findings, "runtime folder");
        assert!(
            health == Health::Broken && found.contains("mode is 0777") && remedy.contains("--runtime-dir"),
            "{found}"
        );
        assert_eq!(about(&findings, "CUDA driver").1, "no NVIDIA kernel module is loaded");
        assert_eq!(about(&findings, "/proc").0, Health::Broken);

        plans.huge_page_bytes = None;
        let findings = examine(&host.kernel, &plans);
        let (health, found, _) = about(&findings, "memory");
        assert_eq!(health, Health::Broken);
        assert_eq!(
            found,
            "the machine's memory leaves 1048576 of 4194304 bytes, 4194304 are needed"
        );
    }

    #[test]
    fn x28_x32_a_container_is_recognised_by_its_namespaces() {
        let host = host(&[
            ("proc/self/status", "NSpid:\t9\n"),
            ("proc/1/ns/x", ""),
            ("proc/self/ns/x", ""),
        ]);
        symlink("mnt:[1]", host.kernel.proc.join("1/ns/mnt")).unwrap();
        symlink("mnt:[2]", host.kernel.proc.join("self/ns/mnt")).unwrap();
        let findings = examine(&host.kernel, &plans(&host));
        let (health, _, remedy) = about(&findings, "namespaces");
        assert_eq!(health, Health::Limited);
        assert!(remedy.contains("share the runtime folder"), "{remedy}");
    }
}
