//! The beginning of a branch of experiments.

use crate::process::Interruption;
use crate::research::experiment::{Experiment, Finished};
use crate::research::git::Repository;
use crate::research::study::{EDITABLE, Settings, Study, branch_folder, branch_name, short};
use anyhow::{Result, bail, ensure};
use std::fs;
use std::path::Path;

/// Makes the branch `autoresearch/<tag>` at HEAD with `settings`, the ledger's header, and measures the baseline. A start that was
/// killed goes on.
///
/// # Errors
/// If the branch is there already, the work tree has changes, or the baseline cannot be measured.
pub fn start(folder: &Path, tag: &str, settings: Settings, interruption: &Interruption) -> Result<Finished> {
    require_tag(tag)?;
    let repository = Repository::open(folder)?;
    let head = repository.require_commit("HEAD")?;
    for name in ["Cargo.toml", EDITABLE[0], EDITABLE[1]] {
        ensure!(
            repository.root().join(name).is_file(),
            "{}: expected this project, found no {name}; hint: run it in a checkout of the project",
            repository.root().display()
        );
    }
    let study = Study::new(repository, tag, settings);
    let repository = &study.repository;
    require_place_for_program(&study)?;
    if is_new(&study, &head)? {
        let changed = repository.changed_files(&head, &[])?;
        ensure!(
            changed.is_empty(),
            "expected no uncommitted changes, found some in {}; hint: commit them, or put them aside with `git stash`",
            changed.join(", ")
        );
        study.require_allowed_sources()?;
        repository.set_reference(&study.reference("start"), &head, None, "autoresearch: start")?;
        repository.set_reference(&study.reference("kept"), &head, None, "autoresearch: start")?;
        study.settings.write(&branch_folder(repository, tag))?;
        repository.create_branch(&study.branch())?;
    }
    let _locks = study.lock("start")?;
    study.ledger.write_header()?;
    let experiment = match Experiment::resume(&study, interruption)? {
        Some(experiment) => experiment,
        None => Experiment::baseline(&study, interruption)?,
    };
    experiment.finish()
}

/// Whether the branch is still to be made; not if a start of it was cut off.
fn is_new(study: &Study, head: &str) -> Result<bool> {
    let repository = &study.repository;
    let branch = study.branch();
    let Some(commit) = repository.commit(&study.branch_reference())? else {
        let references = repository.references(&study.reference(""))?;
        ensure!(
            references.is_empty() && study.ledger.records(&study.tag)?.is_empty() && !study.folder().exists(),
            "start: expected a tag that was never used, found experiments of {}; hint: take another tag",
            study.tag
        );
        return Ok(true);
    };
    let was_cut_off = repository.branch()?.as_ref() == Some(&branch)
        && commit == head
        && repository.commit(&study.reference("start"))?.as_deref() == Some(head)
        && study.ledger.records(&study.tag)?.is_empty();
    if !was_cut_off {
        bail!(
            "start: expected a tag without a branch, found {branch} at {}; hint: `git switch {branch}` goes on with it, another tag begins anew",
            short(&commit)
        );
    }
    let started = Settings::read(&study.folder(), &study.tag)?;
    ensure!(
        started == study.settings,
        "start: expected the flags that {branch} was started with, found others; hint: repeat those, or take another tag"
    );
    Ok(false)
}

/// Refuses to overwrite what is none of ours.
fn require_place_for_program(study: &Study) -> Result<()> {
    let path = study.program();
    ensure!(
        fs::symlink_metadata(&path).is_err() || study.left_program()?,
        "{}: expected a free place for the program, found something there; hint: move it away",
        path.display()
    );
    Ok(())
}

/// A tag becomes part of branches, references and folders.
fn require_tag(tag: &str) -> Result<()> {
    let is_letter = |letter: char| letter.is_ascii_alphanumeric() || "-_".contains(letter);
    ensure!(
        !tag.is_empty() && tag.len() <= 40 && tag.chars().all(is_letter) && !tag.starts_with('-'),
        "start: expected a tag of up to 40 letters, digits, '-' and '_', such as nov30, found {tag:?}; hint: it becomes the branch {}",
        branch_name("<tag>")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_names_for_branches_and_folders() {
        assert!(["nov30", "a", "Nov_30-b"].iter().all(|tag| require_tag(tag).is_ok()));
        let wrong = ["", "-x", "a/b", "a b", "..", "a.lock", "ä", &"x".repeat(41)];
        assert!(wrong.iter().all(|tag| require_tag(tag).is_err()));
    }
}
