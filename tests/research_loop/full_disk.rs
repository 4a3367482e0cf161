//! Disks that are full or may not be written.

use super::{KILL_LIMIT, LOSS, Study, wait_for};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn a_full_disk_and_a_read_only_folder_lose_nothing() {
    let study = Study::prepared();
    let runs = study.path("../small");
    fs::create_dir_all(&runs).unwrap();
    let mount = |options: &str| {
        let mut command = Command::new("mount");
        command
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(&runs)
            .output()
            .is_ok_and(|output| output.status.success())
    };
    if !mount("size=64m") {
        eprintln!("left out: a small disk cannot be mounted here (only root may)");
        return;
    }
    let _unmount = Unmount(&runs);
    let arguments = ["--config", "configs/ci.toml", "--device", "cpu", "--steps", "60", "--eval-tokens", "8192"];
    let place = ["--runs-dir", "../small", "--kill-limit", KILL_LIMIT];
    study.ok(&[&["start", "disk"][..], &arguments, &place].concat());
    let before = study.head();

    // Read-only.
    study.edit("src/model.rs", LOSS.0, LOSS.1);
    assert!(mount("remount,ro"));
    study.assert_refused(&["experiment", "-m", "x"], &["small", "may be written"]);
    assert!(mount("remount,rw,size=64m"));

    // Full before it begins.
    let fill = runs.join("fill");
    fs::write(&fill, vec![1; 50 << 20]).unwrap();
    study.assert_refused(&["experiment", "-m", "x"], &["MiB of free space"]);
    fs::remove_file(&fill).unwrap();

    // Full while it trains: a crash that says why, and the branch goes on.
    let mut child = study.command(&["experiment", "-m", "no room"]).stdout(Stdio::piped()).spawn().unwrap();
    wait_for(&mut child, "training", || study.phase("../small/disk-001") == "training");
    // Writes as much as there is room for.
    fs::write(&fill, vec![1; 64 << 20]).unwrap_err();
    let status = child.wait().unwrap();
    let finish = || {
        fs::remove_file(&fill).unwrap();
        study.run(&["experiment", "--resume"])
    };
    // Where not even the log can be written, the experiment is unfinished.
    if !status.success() {
        let resumed = finish();
        assert_eq!(resumed.code, Some(0), "{resumed:?}");
    }
    let rows = study.rows();
    assert_eq!((rows.len(), rows[1].1.as_str()), (2, "no room"));
    assert!(["crash", "discard"].contains(&rows[1].0.as_str()), "{rows:?}");
    assert_eq!(study.head(), before);
    assert_eq!(study.checkout.git(&["status", "--porcelain"]), "");
}

/// Unmounts in the end.
struct Unmount<'a>(&'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        Command::new("umount").arg(self.0).status().ok();
    }
}
