//! Simulates power failures: synced data survives, and unsynced data may be in any state.

use crate::harness::Turn;
use crate::shim::Op;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The unsynced data that a power failure leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loss {
    /// All of it: only the process died.
    Nothing,
    /// None of it.
    Everything,
    /// A random part: sectors of files, names of directories.
    Random,
}

/// Bytes that a disk writes atomically.
const SECTOR: usize = 512;

#[derive(Clone, Debug, Default)]
struct Node {
    /// The names of a directory; `None` for a file.
    names: Option<[BTreeMap<String, usize>; 2]>,
    content: [Vec<u8>; 2],
}

// Indices of the two states of a node.
const NOW: usize = 0;
const SYNCED: usize = 1;

/// A directory in the program's view, and as stored on the disk.
pub struct Disk {
    root: PathBuf,
    /// The first node is the root.
    nodes: Vec<Node>,
}

impl Disk {
    /// An empty directory, the root of the paths in the log.
    pub fn new(root: PathBuf) -> Self {
        Self { root, nodes: vec![Node { names: Some(Default::default()), ..Default::default() }] }
    }

    /// Applies a logged operation of the program.
    pub fn apply(&mut self, op: &Op) {
        match op.name.as_str() {
            "mkdir" => self.link(&op.path, Node { names: Some(Default::default()), ..Default::default() }),
            "create" => self.link(&op.path, Node::default()),
            "truncate" => self.file(&op.path, |content| content.clear()),
            "resize" => self.file(&op.path, |content| content.resize(op.at, 0)),
            "allocate" => self.file(&op.path, |content| content.resize(content.len().max(op.at), 0)),
            "write" => self.file(&op.path, |content| {
                content.resize(content.len().max(op.at + op.data.len()), 0);
                content[op.at..][..op.data.len()].copy_from_slice(&op.data);
            }),
            "fsync" => self.sync(&op.path),
            "lock" => {}
            "remove" => drop(self.unlink(&op.path)),
            "rename" => {
                if let (Some(node), Some((dir, name))) = (self.unlink(&op.path), self.parent(&op.to)) {
                    self.names(dir).insert(name, node);
                }
            }
            other => panic!("no such call: {other}"),
        }
    }

    fn find(&self, path: &Path) -> Option<usize> {
        let mut at = 0;
        for part in path.strip_prefix(&self.root).ok()?.components() {
            at = *self.nodes[at].names.as_ref()?[NOW].get(part.as_os_str().to_str()?)?;
        }
        Some(at)
    }

    /// The directory of a path, and the last name. `None` for the root.
    fn parent(&self, path: &Path) -> Option<(usize, String)> {
        let name = path.file_name()?.to_str()?.to_string();
        Some((self.find(path.parent()?)?, name))
    }

    fn names(&mut self, dir: usize) -> &mut BTreeMap<String, usize> {
        &mut self.nodes[dir].names.as_mut().expect("a directory")[NOW]
    }

    fn link(&mut self, path: &Path, node: Node) {
        if let Some((dir, name)) = self.parent(path) {
            self.nodes.push(node);
            let new = self.nodes.len() - 1;
            self.names(dir).insert(name, new);
        }
    }

    fn unlink(&mut self, path: &Path) -> Option<usize> {
        let (dir, name) = self.parent(path)?;
        self.names(dir).remove(&name)
    }

    fn file(&mut self, path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        if let Some(at) = self.find(path) {
            change(&mut self.nodes[at].content[NOW]);
        }
    }

    /// Syncs a file's content or a directory's names, each of which needs its own sync.
    fn sync(&mut self, path: &Path) {
        let Some(at) = self.find(path) else { return };
        let node = &mut self.nodes[at];
        node.content[SYNCED] = node.content[NOW].clone();
        if let Some([now, synced]) = &mut node.names {
            *synced = now.clone();
        }
    }

    /// The newest checkpoint that survives every loss, because its name is synced.
    pub fn committed(&self) -> u64 {
        let names = self.nodes[0].names.iter().flat_map(|names| names[SYNCED].keys());
        names.filter_map(|name| name.strip_prefix("checkpoint-")?.parse().ok()).max().unwrap_or(0)
    }

    /// Writes the state after a power failure into the directory `to`.
    pub fn cut(&self, loss: Loss, turn: &mut Turn, to: &Path) {
        self.write(0, loss, turn, to);
    }

    fn write(&self, at: usize, loss: Loss, turn: &mut Turn, to: &Path) {
        let Node { names, content } = &self.nodes[at];
        let Some(names) = names else {
            return fs::write(to, torn(content, loss, turn)).unwrap();
        };
        fs::create_dir_all(to).unwrap();
        for (name, &node) in &names[version(loss, turn)] {
            self.write(node, loss, turn, &to.join(name));
        }
    }
}

/// The state that survives.
fn version(loss: Loss, turn: &mut Turn) -> usize {
    match loss {
        Loss::Nothing => NOW,
        Loss::Everything => SYNCED,
        Loss::Random => turn.pick(2) as usize,
    }
}

/// A file's content after the failure: its length from one of the two states, and each sector from one of them.
fn torn(content: &[Vec<u8>; 2], loss: Loss, turn: &mut Turn) -> Vec<u8> {
    let mut bytes = content[version(loss, turn)].clone();
    for (idx, sector) in bytes.chunks_mut(SECTOR).enumerate().filter(|_| loss == Loss::Random) {
        let other = content[version(loss, turn)].get(idx * SECTOR..).unwrap_or_default();
        let both = sector.len().min(other.len());
        sector[..both].copy_from_slice(&other[..both]);
    }
    bytes
}
