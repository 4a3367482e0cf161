//! The few things that experiments ask of git, by its own command: it runs the user's hooks and reads the user's settings.

use crate::process::{self, How};
use anyhow::{Result, anyhow, bail, ensure};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

/// Longest that a commit may take, hooks included.
const HOOK_LIMIT: Duration = Duration::from_secs(300);

/// A git work tree.
#[derive(Clone, Debug)]
pub struct Repository {
    root: PathBuf,
    own: PathBuf,
    common: PathBuf,
}

impl Repository {
    /// The work tree that `folder` lies in.
    ///
    /// # Errors
    /// If there is none, or no git.
    pub fn open(folder: &Path) -> Result<Self> {
        let hint = "hint: the research loop keeps experiments as commits: run it in a git checkout of this project";
        let at = |what: &str| {
            let output = command(folder).args(["rev-parse", "--path-format=absolute", what]).output();
            let output = output.map_err(|error| anyhow!("git: cannot be run ({error}); hint: install git"))?;
            ensure!(output.status.success(), "{}: expected a git work tree, found none; {hint}", folder.display());
            Ok(PathBuf::from(text(&output.stdout).trim_end_matches('\n')))
        };
        Ok(Self { root: at("--show-toplevel")?, own: at("--git-dir")?, common: at("--git-common-dir")? })
    }

    /// Top of the work tree.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Git's own folder for this work tree.
    pub fn own_dir(&self) -> &Path {
        &self.own
    }

    /// Git's own folder, shared by all work trees of the repository.
    pub fn common_dir(&self) -> &Path {
        &self.common
    }

    /// The branch that is checked out; none if HEAD is detached.
    pub fn branch(&self) -> Result<Option<String>> {
        let output = self.output(&["symbolic-ref", "--quiet", "HEAD"])?;
        let name = text(&output.stdout).trim().to_owned();
        Ok(output.status.success().then(|| name.trim_start_matches("refs/heads/").to_owned()))
    }

    /// The commit that `revision` names, if it names one.
    pub fn commit(&self, revision: &str) -> Result<Option<String>> {
        let output = self.output(&["rev-parse", "--quiet", "--verify", &format!("{revision}^{{commit}}")])?;
        Ok(output.status.success().then(|| text(&output.stdout).trim().to_owned()))
    }

    /// The commit that `revision` names.
    ///
    /// # Errors
    /// If it names none.
    pub fn require_commit(&self, revision: &str) -> Result<String> {
        self.commit(revision)?.ok_or_else(|| {
            anyhow!("git: expected a commit named {revision}, found none; hint: `git for-each-ref refs/autoresearch` lists those of experiments")
        })
    }

    /// Whether `ancestor` is `commit` or among those that it builds on.
    pub fn is_ancestor(&self, ancestor: &str, commit: &str) -> Result<bool> {
        Ok(self.output(&["merge-base", "--is-ancestor", ancestor, commit])?.status.success())
    }

    /// Tracked files of the work tree, the index or HEAD that differ from `commit`, without those of `but`.
    pub fn changed_files(&self, commit: &str, but: &[&str]) -> Result<Vec<String>> {
        let mut changed = self.diff_names(&[commit], but)?;
        changed.extend(self.diff_names(&["--cached", commit], but)?);
        changed.extend(self.changed_between(commit, "HEAD", but)?);
        changed.sort();
        changed.dedup();
        Ok(changed)
    }

    /// Files that differ between two commits, without those of `but`.
    pub fn changed_between(&self, from: &str, to: &str, but: &[&str]) -> Result<Vec<String>> {
        self.diff_names(&[from, to], but)
    }

    fn diff_names(&self, sides: &[&str], but: &[&str]) -> Result<Vec<String>> {
        let excluded: Vec<String> = but.iter().map(|path| format!(":(exclude,top,literal){path}")).collect();
        let mut arguments = vec!["diff", "--name-only", "-z", "--no-ext-diff", "--no-renames"];
        arguments.extend(sides);
        arguments.extend(["--", ":(top)"]);
        arguments.extend(excluded.iter().map(String::as_str));
        let found = self.run(&arguments)?;
        Ok(found.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect())
    }

    /// Tracked files whose changes git was told not to see (`assume-unchanged`, `skip-worktree`).
    pub fn hidden_files(&self) -> Result<Vec<String>> {
        let files = self.run(&["ls-files", "-v", "-z"])?;
        let hidden = files.split('\0').filter_map(|entry| entry.split_once(' '));
        let hidden = hidden.filter(|(mark, _)| mark.starts_with('S') || mark.starts_with(char::is_lowercase));
        Ok(hidden.map(|(_, path)| path.to_owned()).collect())
    }

    /// Whether the file at `path` is in the work tree as it is in `commit`.
    pub fn is_as_in(&self, commit: &str, path: &str) -> Result<bool> {
        let output = self.output(&["diff", "--quiet", "--no-ext-diff", commit, "--", path])?;
        match output.status.code() {
            Some(1) => Ok(false),
            _ => check(&output, "git diff").map(|_| true),
        }
    }

    /// Commits what the work tree has of `paths`, nothing else, with the user's hooks; gives the commit.
    ///
    /// # Errors
    /// With git's or the hook's own words.
    pub fn commit_files(&self, paths: &[&str], message: &str) -> Result<String> {
        let mut git = command(&self.root);
        git.args(["commit", "--quiet", "--cleanup=verbatim", "--message", message, "--only", "--"]).args(paths);
        // A hook may wait for an answer that nobody gives.
        let output = process::output(git, HOOK_LIMIT)?;
        if output.how != How::Exited(0) {
            bail!(
                "git commit: expected it to take the edit, found: {}; hint: the edit is as it was; a hook of this repository may have refused it",
                said(&output.stdout, &output.stderr)
            );
        }
        self.require_commit("HEAD")
    }

    /// Points the reference `name` at `commit`, if it still is at `expected` where that is given.
    ///
    /// # Errors
    /// If it is somewhere else.
    pub fn set_reference(&self, name: &str, commit: &str, expected: Option<&str>, why: &str) -> Result<()> {
        let mut arguments = vec!["update-ref", "-m", why, name, commit];
        arguments.extend(expected);
        self.run(&arguments).map(drop)
    }

    /// Removes the reference `name`, if it is there.
    pub fn delete_reference(&self, name: &str) -> Result<()> {
        self.run(&["update-ref", "-d", name]).map(drop)
    }

    /// References below `prefix`: last component and commit.
    pub fn references(&self, prefix: &str) -> Result<Vec<(String, String)>> {
        let listed = self.run(&["for-each-ref", "--format=%(refname) %(objectname)", prefix])?;
        let entries = listed.lines().filter_map(|line| line.split_once(' '));
        Ok(entries
            .map(|(name, commit)| (name.rsplit('/').next().unwrap_or(name).to_owned(), commit.to_owned()))
            .collect())
    }

    /// Makes the index have `paths` as they are in `commit`; the work tree stays.
    pub fn unstage(&self, commit: &str, paths: &[&str]) -> Result<()> {
        let mut arguments = vec!["restore", "--staged", "--source", commit, "--"];
        arguments.extend(paths);
        self.run(&arguments).map(drop)
    }

    /// Makes index and work tree have `paths` as they are in `commit`.
    pub fn restore(&self, commit: &str, paths: &[&str]) -> Result<()> {
        let mut arguments = vec!["restore", "--staged", "--worktree", "--source", commit, "--"];
        arguments.extend(paths);
        self.run(&arguments).map(drop)
    }

    /// Makes the branch `name` at HEAD and checks it out.
    pub fn create_branch(&self, name: &str) -> Result<()> {
        self.run(&["switch", "--quiet", "--create", name]).map(drop)
    }

    /// How the work tree differs from `commit`, as a patch.
    pub fn difference(&self, commit: &str) -> Result<String> {
        self.run(&["diff", "--no-ext-diff", "--no-textconv", "--no-color", commit])
    }

    /// What turns `from` into `to`, as `git apply` takes it.
    pub fn patch(&self, from: &str, to: &str) -> Result<String> {
        self.run(&[
            "diff",
            "--no-ext-diff",
            "--no-textconv",
            "--no-color",
            "--binary",
            "--src-prefix=a/",
            "--dst-prefix=b/",
            from,
            to,
        ])
    }

    /// First line of the message of `commit`.
    pub fn subject(&self, commit: &str) -> Result<String> {
        Ok(self.run(&["log", "-1", "--format=%s", commit])?.trim().to_owned())
    }

    /// Makes `folder` a work tree of its own with the files of `commit`, whatever it held; hooks are not run.
    pub fn checkout(&self, folder: &Path, commit: &str) -> Result<()> {
        let no_hooks = "core.hooksPath=/dev/null";
        let mut probe = command(folder);
        let is_usable = folder.join(".git").exists()
            && probe.args(["rev-parse", "--verify", "HEAD"]).output().is_ok_and(|output| output.status.success());
        if !is_usable {
            // The repository was moved, or git was killed while it made the folder.
            if folder.exists() {
                std::fs::remove_dir_all(folder).map_err(|error| {
                    anyhow!("{}: cannot be removed ({error}); hint: git's folder must be writable", folder.display())
                })?;
            }
            self.run(&["worktree", "prune"])?;
            let add = ["-c", no_hooks, "worktree", "add", "--quiet", "--force", "--force", "--detach"];
            let mut arguments: Vec<&OsStr> = add.iter().map(OsStr::new).collect();
            arguments.extend([folder.as_os_str(), OsStr::new(commit)]);
            return check(&self.output(&arguments)?, "git worktree add").map(drop);
        }
        let lock =
            command(folder).args(["rev-parse", "--path-format=absolute", "--git-path", "index.lock"]).output()?;
        // Left by a git that was killed: this folder is ours alone.
        std::fs::remove_file(text(&lock.stdout).trim_end_matches('\n')).ok();
        let output =
            command(folder).args(["-c", no_hooks, "checkout", "--quiet", "--force", "--detach", commit]).output()?;
        check(&output, "git checkout").map(drop)
    }

    fn run(&self, arguments: &[&str]) -> Result<String> {
        check(&self.output(arguments)?, &format!("git {}", arguments[0]))
    }

    fn output<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Result<Output> {
        command(&self.root)
            .args(arguments)
            .output()
            .map_err(|error| anyhow!("git: cannot be run ({error}); hint: install git"))
    }
}

fn command(folder: &Path) -> Command {
    let mut command = Command::new("git");
    command.arg("-C").arg(folder);
    // Messages in the language that ours are in; no question that nobody answers at night.
    command.env("LC_ALL", "C").env("GIT_TERMINAL_PROMPT", "0").env("GIT_EDITOR", "true");
    command.stdin(std::process::Stdio::null());
    // Set inside hooks, and then about another repository than the folder's.
    for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"] {
        command.env_remove(name);
    }
    command
}

fn check(output: &Output, what: &str) -> Result<String> {
    if !output.status.success() {
        let said = said(&output.stdout, &output.stderr);
        let hint = if said.contains(".lock") {
            "hint: if no other git is running, remove that lock file"
        } else {
            "hint: `git status` shows the state of the repository"
        };
        bail!("{what}: expected success, found {}: {said}; {hint}", output.status);
    }
    Ok(text(&output.stdout))
}

/// What a command printed, on one line and not too long.
fn said(stdout: &[u8], stderr: &[u8]) -> String {
    let all = [text(stderr), text(stdout)].join("\n");
    let lines: Vec<&str> = all.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let line = lines.join(" / ");
    match line.char_indices().nth(600) {
        Some((end, _)) => format!("{} …", &line[..end]),
        None if line.is_empty() => "no message".to_owned(),
        None => line,
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::fs;
    use tempfile::TempDir;

    /// A repository with one commit of these files.
    pub(crate) fn repository(files: &[(&str, &str)]) -> (TempDir, Repository) {
        let folder = tempfile::tempdir().unwrap();
        let git = |arguments: &[&str]| {
            let output = command(folder.path()).args(arguments).output().unwrap();
            assert!(output.status.success(), "{arguments:?}: {output:?}");
        };
        git(&["init", "--quiet", "--initial-branch", "main"]);
        for (key, value) in [("user.name", "Test"), ("user.email", "test@example.org"), ("commit.gpgsign", "false")] {
            git(&["config", key, value]);
        }
        for (name, content) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        git(&["add", "--all"]);
        git(&["commit", "--quiet", "--message", "first"]);
        let repository = Repository::open(folder.path()).unwrap();
        (folder, repository)
    }

    #[test]
    fn changes_are_seen_in_the_work_tree_and_in_the_index_but_not_where_they_are_excluded() {
        let (folder, repository) =
            repository(&[("src/model.rs", "a"), ("src/eval.rs", "a"), ("b", "b"), ("a name", "")]);
        let head = repository.require_commit("HEAD").unwrap();
        let changed = || repository.changed_files(&head, &["src/model.rs"]).unwrap();
        assert!(changed().is_empty());
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("src/model.rs", "edited");
        write("untracked", "");
        assert!(changed().is_empty());
        write("src/eval.rs", "edited");
        fs::remove_file(folder.path().join("a name")).unwrap();
        assert_eq!(changed(), ["a name", "src/eval.rs"]);
        // Staged, and put back in the work tree.
        repository.run(&["add", "src/eval.rs", "untracked"]).unwrap();
        write("src/eval.rs", "a");
        assert_eq!(changed(), ["a name", "src/eval.rs", "untracked"]);
        repository.run(&["update-index", "--assume-unchanged", "b"]).unwrap();
        assert_eq!(repository.hidden_files().unwrap(), ["b"]);
        // Committed, and put back in the work tree and the index.
        repository.run(&["reset", "--quiet", &head, "--", "."]).unwrap();
        write("src/eval.rs", "edited");
        repository.run(&["commit", "--quiet", "--message", "sneaky", "--", "src/eval.rs"]).unwrap();
        repository.run(&["restore", "--staged", "--worktree", "--source", &head, "src/eval.rs"]).unwrap();
        assert_eq!(changed(), ["a name", "src/eval.rs"]);
    }

    #[test]
    fn a_commit_has_the_named_files_and_nothing_that_was_staged_beside_them() {
        let (folder, repository) = repository(&[("a", "1"), ("b", "1")]);
        fs::write(folder.path().join("a"), "2").unwrap();
        fs::write(folder.path().join("b"), "2").unwrap();
        repository.run(&["add", "b"]).unwrap();
        let before = repository.require_commit("HEAD").unwrap();
        let commit = repository.commit_files(&["a"], "only a\n# no comment").unwrap();
        let names = repository.run(&["diff", "--name-only", &before, &commit]).unwrap();
        assert_eq!(names, "a\n");
        assert_eq!(repository.subject(&commit).unwrap(), "only a # no comment");
        assert_eq!(repository.run(&["diff", "--cached", "--name-only"]).unwrap(), "b\n");
    }

    #[test]
    #[cfg(unix)]
    fn a_hook_that_refuses_is_quoted_and_leaves_the_edit() {
        use std::os::unix::fs::PermissionsExt;
        let (folder, repository) = repository(&[("a", "1")]);
        let hook = folder.path().join(".git/hooks/pre-commit");
        fs::write(&hook, "#!/bin/sh\necho no commits on Sundays >&2\nexit 1\n").unwrap();
        fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(folder.path().join("a"), "2").unwrap();
        let head = repository.require_commit("HEAD").unwrap();
        let message = repository.commit_files(&["a"], "try").unwrap_err().to_string();
        assert!(message.contains("no commits on Sundays") && message.contains("; hint: "), "{message}");
        assert_eq!(repository.require_commit("HEAD").unwrap(), head);
        assert_eq!(fs::read_to_string(folder.path().join("a")).unwrap(), "2");
    }

    #[test]
    fn a_folder_of_our_own_has_the_files_of_any_commit_whatever_it_had() {
        let (folder, repository) = repository(&[("a", "1")]);
        let first = repository.require_commit("HEAD").unwrap();
        fs::write(folder.path().join("a"), "2").unwrap();
        let second = repository.commit_files(&["a"], "second").unwrap();
        let own = repository.common_dir().join("own");
        let content = || fs::read_to_string(own.join("a")).unwrap();
        repository.checkout(&own, &first).unwrap();
        assert_eq!(content(), "1");
        fs::write(own.join("a"), "damaged").unwrap();
        fs::write(repository.common_dir().join("worktrees/own/index.lock"), "").unwrap();
        repository.checkout(&own, &second).unwrap();
        assert_eq!(content(), "2");
        fs::remove_dir_all(&own).unwrap();
        repository.checkout(&own, &first).unwrap();
        assert_eq!(content(), "1");
        assert_eq!(repository.branch().unwrap().as_deref(), Some("main"));
    }

    #[test]
    fn no_repository_is_an_error_with_a_hint() {
        let folder = tempfile::tempdir().unwrap();
        let message = Repository::open(folder.path()).unwrap_err().to_string();
        assert!(message.contains("expected a git work tree") && message.contains("; hint: "), "{message}");
    }
}
