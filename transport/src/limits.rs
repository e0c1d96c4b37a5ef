//! What the kernel lets this process have, read from its files: memory, control groups, huge pages, locked memory.
//!
//! Read before a segment is reserved, so that too large a pool is an error with sizes (X30), and by `doctor` (X32).

use std::fs;
use std::path::{Path, PathBuf};

/// A limit on memory, with what is left below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// What limits: a file of a control group, or the machine.
    pub name: String,
    /// The limit in bytes.
    pub limit_bytes: u64,
    /// What can still be had below it, reclaimable file pages included.
    pub free_bytes: u64,
}

/// The two roots below which the kernel shows itself. Tests give folders of their own.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// `/proc`.
    pub proc: PathBuf,
    /// `/sys`.
    pub sys: PathBuf,
}

impl Default for Kernel {
    fn default() -> Self {
        Self {
            proc: "/proc".into(),
            sys: "/sys".into(),
        }
    }
}

impl Kernel {
    /// Every limit on this process's memory that could be read: the machine's, then each control group's from the
    /// process's own up to the root.
    pub fn memory_limits(&self) -> Vec<MemoryLimit> {
        let mut limits = Vec::new();
        if let Ok(meminfo) = fs::read_to_string(self.proc.join("meminfo")) {
            let kib = |key| keyed(&meminfo, key).map(|kib| kib.saturating_mul(1024));
            if let (Some(limit_bytes), Some(free_bytes)) = (kib("MemTotal:"), kib("MemAvailable:")) {
                limits.push(MemoryLimit {
                    name: "the machine's memory".into(),
                    limit_bytes,
                    free_bytes,
                });
            }
        }
        let groups = fs::read_to_string(self.proc.join("self/cgroup")).unwrap_or_default();
        for line in groups.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
                continue;
            };
            let (root, names) = match controllers {
                "" => ("fs/cgroup", ["memory.max", "memory.current"]),
                _ if controllers.split(',').any(|name| name == "memory") => {
                    ("fs/cgroup/memory", ["memory.limit_in_bytes", "memory.usage_in_bytes"])
                }
                _ => continue,
            };
            let root = self.sys.join(root);
            let own = root.join(path.trim_start_matches('/'));
            for group in own.ancestors().take_while(|group| group.starts_with(&root)) {
                limits.extend(group_limit(group, names));
            }
        }
        limits
    }

    /// The limit that leaves least.
    pub fn tightest_memory(&self) -> Option<MemoryLimit> {
        self.memory_limits().into_iter().min_by_key(|limit| limit.free_bytes)
    }

    /// Huge pages of `page_bytes` bytes that are neither used nor promised, or `None` where the size is not supported.
    pub fn free_huge_pages(&self, page_bytes: u64) -> Option<u64> {
        let pages = self
            .sys
            .join(format!("kernel/mm/hugepages/hugepages-{}kB", page_bytes / 1024));
        let free = number(&pages.join("free_hugepages"))?;
        Some(free.saturating_sub(number(&pages.join("resv_hugepages")).unwrap_or(0)))
    }

    /// NUMA nodes that are online, as the kernel writes them ("0-1"), or "0" where it does not say.
    pub fn numa_nodes(&self) -> String {
        let nodes = fs::read_to_string(self.sys.join("devices/system/node/online"));
        nodes.map_or_else(|_| "0".into(), |nodes| nodes.trim().to_owned())
    }

    /// What is left on one NUMA node: free memory and file pages that can be dropped.
    pub fn node_free_bytes(&self, node: u32) -> Option<u64> {
        let info = fs::read_to_string(self.sys.join(format!("devices/system/node/node{node}/meminfo"))).ok()?;
        // Each line reads "Node 0 MemFree:  1234 kB".
        let kib = |key: &str| {
            let line = info.lines().find(|line| line.split_whitespace().nth(2) == Some(key))?;
            line.split_whitespace().nth(3)?.parse::<u64>().ok()
        };
        let files = kib("FilePages:")?.saturating_sub(kib("Shmem:")?);
        Some(kib("MemFree:")?.saturating_add(files).saturating_mul(1024))
    }
}

fn group_limit(group: &Path, [max, current]: [&str; 2]) -> Option<MemoryLimit> {
    let limit_bytes = number(&group.join(max))?;
    let used = number(&group.join(current))?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    // File pages count as used but are dropped before anything fails.
    let reclaimable = ["inactive_file", "active_file"].map(|key| keyed(&stat, key).unwrap_or(0));
    let used = used.saturating_sub(reclaimable.iter().sum());
    Some(MemoryLimit {
        name: group.join(max).display().to_string(),
        limit_bytes,
        free_bytes: limit_bytes.saturating_sub(used),
    })
}

/// The number that follows `key` at the start of a line.
fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(key)).then(|| words.next()?.parse().ok())?
    })
}

/// A file that holds one number; `None` also for "max".
pub(crate) fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(files: &[(&str, &str)]) -> (tempfile::TempDir, Kernel) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let kernel = Kernel {
            proc: root.path().join("proc"),
            sys: root.path().join("sys"),
        };
        (root, kernel)
    }

    #[test]
    fn x30_the_tightest_limit_may_be_a_parent_control_group() {
        let (_root, kernel) = kernel(&[
            (
                "proc/meminfo",
                "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 900 kB\n",
            ),
            ("proc/self/cgroup", "0::/pod/engine\n"),
            ("sys/fs/cgroup/pod/engine/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/engine/memory.current", "5\n"),
            ("sys/fs/cgroup/pod/memory.max", "300000\n"),
            ("sys/fs/cgroup/pod/memory.current", "250000\n"),
            (
                "sys/fs/cgroup/pod/memory.stat",
                "anon 9\ninactive_file 20000\nactive_file 10000\n",
            ),
        ]);
        let limit = kernel.tightest_memory().unwrap();
        assert!(limit.name.ends_with("sys/fs/cgroup/pod/memory.max"), "{}", limit.name);
        assert_eq!((limit.limit_bytes, limit.free_bytes), (300_000, 80_000));
        assert_eq!(kernel.memory_limits().len(), 2);
    }

    #[test]
    fn x30_limits_of_the_older_control_groups_are_read_too() {
        let (_root, kernel) = kernel(&[
            ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n"),
            ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "4096\n"),
            ("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "1096\n"),
        ]);
        assert_eq!(kernel.tightest_memory().unwrap().free_bytes, 3000);
    }

    #[test]
    fn x32_huge_pages_that_are_promised_are_not_free() {
        let (_root, kernel) = kernel(&[
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "7\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "3\n"),
            (
                "sys/devices/system/node/node1/meminfo",
                "Node 1 MemFree: 8 kB\nNode 1 FilePages: 6 kB\nNode 1 Shmem: 4 kB\n",
            ),
        ]);
        assert_eq!(kernel.free_huge_pages(2 << 20), Some(4));
        assert_eq!(kernel.free_huge_pages(1 << 30), None);
        assert_eq!(kernel.node_free_bytes(1), Some(10 * 1024));
        assert_eq!(kernel.node_free_bytes(0), None);
        assert_eq!(kernel.numa_nodes(), "0");
    }
}
