//! One branch of experiments, `autoresearch/<tag>`: where it started, what it keeps, how its experiments are trained.

use crate::research::decision::Status;
use crate::research::git::Repository;
use crate::research::journal::Journal;
use crate::research::ledger::{Ledger, Record};
use crate::research::lock::Lock;
use crate::research::source_check;
use crate::research::state;
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// What an experiment may edit.
pub const EDITABLE: [&str; 2] = ["src/model.rs", "src/optim.rs"];

/// Name of the file in a branch's folder.
const SETTINGS: &str = "settings.json";

/// Name of the work tree's lock.
const WORK_LOCK: &str = "work.lock";

/// Name of the file that says how large the copy of the program is.
const PROGRAM: &str = "program.json";

/// Branches of experiments begin with it.
const BRANCH_PREFIX: &str = "autoresearch/";

/// What all experiments of a branch share: fixed by `start`, since other conditions would make other numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// What `train` gets besides the run's folder.
    pub train_arguments: Vec<String>,
    /// Name of the configuration.
    pub config: String,
    /// SHA-256 of the configuration with all flags applied, and of the number of steps, if that is the limit.
    pub config_sha256: String,
    /// As `--device` has it.
    pub device: String,
    pub seed: u64,
    /// Folder for the runs' folders.
    pub runs_dir: PathBuf,
    /// Folder for the locks of devices.
    pub locks_dir: PathBuf,
    /// A training is killed after this time, in seconds.
    pub limit_seconds: f64,
    /// Whether the weights of runs that are not kept stay, too.
    pub keep_weights: bool,
    /// SHA-256 of the settings of cargo that git does not track; none if there are none.
    pub cargo_settings_sha256: Option<String>,
}

/// One branch of experiments.
#[derive(Clone, Debug)]
pub struct Study {
    pub repository: Repository,
    pub tag: String,
    pub settings: Settings,
    pub ledger: Ledger,
}

impl Study {
    /// The one whose branch is checked out in the work tree that `folder` lies in.
    ///
    /// # Errors
    /// If HEAD is detached or on another branch, or `start` has not made this one.
    pub fn open(folder: &Path) -> Result<Self> {
        let repository = Repository::open(folder)?;
        let start =
            "hint: `start <tag>` makes one from here, `git switch autoresearch/<tag>` goes to one that is there";
        let branch = repository.branch()?.with_context(|| {
            format!("HEAD: expected the branch {BRANCH_PREFIX}<tag>, found a commit without a branch (detached HEAD); {start}")
        })?;
        let Some(tag) = branch.strip_prefix(BRANCH_PREFIX) else {
            bail!("HEAD: expected the branch {BRANCH_PREFIX}<tag>, found {branch}; {start}");
        };
        let settings = Settings::read(&branch_folder(&repository, tag), tag)?;
        Ok(Self::new(repository, tag, settings))
    }

    /// The study of the branch `tag` with `settings`.
    pub fn new(repository: Repository, tag: &str, settings: Settings) -> Self {
        let ledger = Ledger::new(&own_folder(&repository), repository.root());
        Self { repository, tag: tag.to_owned(), settings, ledger }
    }

    /// The branch.
    pub fn branch(&self) -> String {
        branch_name(&self.tag)
    }

    /// The branch as git's reference.
    pub fn branch_reference(&self) -> String {
        format!("refs/heads/{}", self.branch())
    }

    /// Ours, below which `start`, `kept` and the experiments' numbers are references to commits.
    pub fn reference(&self, name: &str) -> String {
        format!("refs/autoresearch/{}/{name}", self.tag)
    }

    /// Where the branch's own files lie.
    pub fn folder(&self) -> PathBuf {
        branch_folder(&self.repository, &self.tag)
    }

    /// Where the files of this work tree lie, which all its branches share.
    pub fn work_folder(&self) -> PathBuf {
        self.repository.own_dir().join("autoresearch")
    }

    /// The folder in which commits are built.
    pub fn checkout(&self) -> PathBuf {
        self.work_folder().join("checkout")
    }

    /// The copy of the program that `start` leaves: it does not follow the edits.
    pub fn program(&self) -> PathBuf {
        self.repository.root().join(format!("autoresearch{}", std::env::consts::EXE_SUFFIX))
    }

    /// Leaves a copy of `built` there.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn leave_program(&self, built: &Path) -> Result<()> {
        let path = self.program();
        let copy = || -> std::io::Result<()> {
            let temporary =
                tempfile::Builder::new().prefix(".autoresearch").tempfile_in(self.repository.root())?.into_temp_path();
            fs::copy(built, &temporary)?;
            temporary.persist(&path).map_err(|failed| failed.error)
        };
        copy().map_err(|error| {
            anyhow!("{}: cannot leave the program there ({error}); hint: is the folder writable?", path.display())
        })?;
        state::write(&self.work_folder().join(PROGRAM), &fs::metadata(&path)?.len())
    }

    /// Whether what lies there is such a copy, as far as its size tells.
    ///
    /// # Errors
    /// If that cannot be read.
    pub fn left_program(&self) -> Result<bool> {
        let left: Option<u64> = state::read(&self.work_folder().join(PROGRAM), "a file's size", "remove it")?;
        let found = fs::symlink_metadata(self.program()).ok().filter(|metadata| metadata.is_file());
        Ok(left.is_some() && left == found.map(|metadata| metadata.len()))
    }

    /// The commit that the branch started from.
    ///
    /// # Errors
    /// If its reference is gone.
    pub fn start(&self) -> Result<String> {
        self.repository.require_commit(&self.reference("start"))
    }

    /// The commit of the best experiment.
    ///
    /// # Errors
    /// If its reference is gone.
    pub fn kept(&self) -> Result<String> {
        self.repository.require_commit(&self.reference("kept"))
    }

    /// The record of the best experiment: none before a baseline has given a number.
    ///
    /// # Errors
    /// If the ledger cannot be read.
    pub fn best(&self) -> Result<Option<Record>> {
        let kept = self.kept()?;
        let records = self.ledger.records(&self.tag)?;
        Ok(records.into_iter().rev().find(|record| record.status == Status::Keep && record.commit == kept))
    }

    /// The number that the next experiment gets: none that was ever given.
    ///
    /// # Errors
    /// If the ledger or the references cannot be read.
    pub fn next_number(&self) -> Result<u32> {
        let recorded = self.ledger.records(&self.tag)?.into_iter().map(|record| record.number);
        let references = self.repository.references(&self.reference(""))?;
        let referenced = references.iter().filter_map(|(name, _)| name.parse().ok());
        Ok(recorded.chain(referenced).max().map_or(0, |last: u32| last + 1))
    }

    /// Who has the work tree, if anybody has.
    pub fn holder(&self) -> Option<String> {
        Lock::holder(&self.work_folder(), WORK_LOCK)
    }

    /// Takes the work tree, and with it the branch, and the device for this process.
    ///
    /// # Errors
    /// If another process has one of them.
    pub fn lock(&self, command: &str) -> Result<(Lock, Lock)> {
        let work = format!("{command} in {}", self.repository.root().display());
        Ok((
            Lock::take(&self.work_folder(), WORK_LOCK, &work)?,
            Lock::take_device(&self.settings.locks_dir, &self.settings.device, &work)?,
        ))
    }

    /// Refuses to begin something while something else is unfinished.
    ///
    /// # Errors
    /// If something is.
    pub fn require_finished(&self) -> Result<()> {
        if let Some(journal) = Journal::read(&self.folder())? {
            bail!(
                "experiment {}: expected it to be finished, found it interrupted (step: {}); hint: `experiment --resume` goes on with it, `undo` takes it back and leaves the edit",
                journal.number,
                journal.phase.name()
            );
        }
        Ok(())
    }

    /// Makes sure that nothing but the editable files differs from where the branch started, and that those hold only what an
    /// experiment may use.
    ///
    /// # Errors
    /// Otherwise: it names the files.
    pub fn require_within_bounds(&self) -> Result<()> {
        let start = self.start()?;
        let changed = self.repository.changed_files(&start, &EDITABLE)?;
        if let Some(first) = changed.first() {
            let restore = format!("`git restore --source={} --staged --worktree {first}` takes it back", short(&start));
            let hint = if self.repository.changed_between(&start, "HEAD", &EDITABLE)?.is_empty() {
                restore
            } else {
                format!(
                    "`git reset --soft {}` takes commits back and leaves the edits, then {restore}",
                    short(&self.kept()?)
                )
            };
            bail!(
                "expected changes in {} alone, found others: {}; hint: {hint}",
                EDITABLE.join(" and "),
                shortened(&changed)
            );
        }
        let hidden = self.repository.hidden_files()?;
        ensure!(
            hidden.is_empty(),
            "expected git to see all files, found some marked as unchanged: {}; hint: `git update-index --no-assume-unchanged --no-skip-worktree FILE`",
            shortened(&hidden)
        );
        self.require_allowed_sources()
    }

    /// Makes sure that the editable files hold only what an experiment may use.
    ///
    /// # Errors
    /// Otherwise: it names file, line and what is found there.
    pub fn require_allowed_sources(&self) -> Result<()> {
        for name in EDITABLE {
            let path = self.repository.root().join(name);
            // What a link points to is in no commit.
            let is_file = fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_file());
            ensure!(
                is_file,
                "{name}: expected a file, found something else or nothing; hint: `git restore {name}` brings it back"
            );
            let source = fs::read_to_string(&path).map_err(|error| {
                anyhow!("{name}: cannot be read ({error}); hint: `git restore {name}` brings it back")
            })?;
            source_check::check(name, &source)?;
        }
        Ok(())
    }

    /// [`Study::require_allowed_sources`] of the files that were built, which the compiler has understood.
    ///
    /// # Errors
    /// If they hold something else, or something that cannot be looked into.
    pub fn check_built(&self) -> Result<()> {
        for name in EDITABLE {
            let path = self.checkout().join(name);
            let source = fs::read_to_string(&path)
                .map_err(|error| anyhow!("{}: cannot be read ({error}); hint: try again", path.display()))?;
            source_check::check_built(name, &source)?;
        }
        Ok(())
    }

    /// Editable files that the work tree has otherwise than `commit`.
    ///
    /// # Errors
    /// If git fails.
    pub fn edited_since(&self, commit: &str) -> Result<Vec<&'static str>> {
        let mut edited = Vec::new();
        for name in EDITABLE {
            if !self.repository.is_as_in(commit, name)? {
                edited.push(name);
            }
        }
        Ok(edited)
    }

    /// Refuses in the midst of a merge or the like, which a commit of ours would end.
    ///
    /// # Errors
    /// If there is one.
    pub fn require_no_merge(&self) -> Result<()> {
        let signs = ["MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply"];
        if let Some(sign) = signs.iter().find(|sign| self.repository.own_dir().join(sign).exists()) {
            bail!(
                "git: expected no merge, cherry-pick or rebase under way, found {sign}; hint: `git status` says how to end it"
            );
        }
        Ok(())
    }

    /// Refuses when the editable files differ from the kept commit.
    ///
    /// # Errors
    /// If they do.
    pub fn require_no_edit(&self) -> Result<String> {
        let kept = self.kept()?;
        let head = self.repository.require_commit("HEAD")?;
        let edited = self.edited_since(&kept)?;
        ensure!(
            head == kept && edited.is_empty(),
            "expected the branch at the kept commit {} without an edit, found {}; hint: `experiment` measures an edit, `git stash` puts it aside",
            short(&kept),
            if edited.is_empty() {
                format!("HEAD at {}", short(&head))
            } else {
                format!("edits in {}", edited.join(", "))
            }
        );
        Ok(kept)
    }
}

impl Settings {
    /// Those of the branch `tag`, whose folder is `folder`.
    ///
    /// # Errors
    /// If there are none.
    pub fn read(folder: &Path, tag: &str) -> Result<Self> {
        let path = folder.join(SETTINGS);
        let hint = format!("`start` with another tag than {tag} makes a branch for experiments from here");
        let settings = state::read(&path, "a branch's settings", &hint)?;
        settings.ok_or_else(|| {
            anyhow!("{}: expected what `start` wrote for this branch, found none; hint: {hint}", path.display())
        })
    }

    /// Writes them for the branch whose folder is `folder`.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn write(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder).map_err(|error| {
            anyhow!("{}: cannot be made ({error}); hint: git's folder must be writable", folder.display())
        })?;
        state::write(&folder.join(SETTINGS), self)
    }
}

/// The branch of the study `tag`.
pub fn branch_name(tag: &str) -> String {
    format!("{BRANCH_PREFIX}{tag}")
}

/// Where a repository's own files lie: in git's folder, where nothing that cleans a work tree finds them.
pub fn own_folder(repository: &Repository) -> PathBuf {
    repository.common_dir().join("autoresearch")
}

/// Where a branch's own files lie.
pub fn branch_folder(repository: &Repository, tag: &str) -> PathBuf {
    own_folder(repository).join("branches").join(tag)
}

/// The first digits of a commit.
pub fn short(commit: &str) -> &str {
    &commit[..commit.len().min(7)]
}

/// A list of files that fits a line.
fn shortened(files: &[String]) -> String {
    let listed = files.iter().take(5).map(String::as_str).collect::<Vec<_>>().join(", ");
    match files.len().saturating_sub(5) {
        0 => listed,
        more => format!("{listed} and {more} more"),
    }
}
