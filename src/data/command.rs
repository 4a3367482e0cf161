//! Commands to copy: how a message tells what to run next.

use std::path::Path;

/// [`PROGRAM`] with features of which wgpu is one: the default feature `autotune` is part of it.
macro_rules! with_features {
    ($features:literal) => {
        if cfg!(feature = "autotune") {
            concat!("cargo run --release --features ", $features, " --")
        } else {
            concat!("cargo run --release --no-default-features --features flex,", $features, " --")
        }
    };
}

/// How cargo runs this program as it was built: with other features it would build all over again, or have no GPUs.
pub const PROGRAM: &str = match (cfg!(feature = "tch"), cfg!(feature = "vulkan"), cfg!(feature = "wgpu")) {
    (true, true, _) => with_features!("tch,vulkan"),
    (true, false, true) => with_features!("tch,wgpu"),
    (true, false, false) => "cargo run --release --features tch --",
    (false, true, _) => with_features!("vulkan"),
    (false, false, true) => with_features!("wgpu"),
    (false, false, false) => "cargo run --release --",
};

/// A command line of this program that a shell takes as it stands: `words`, and `--cache-dir` where one was given.
pub fn command(words: &[&str], cache_dir: Option<&Path>) -> String {
    let cache_dir = cache_dir.map(Path::to_string_lossy);
    let cache_words = cache_dir.iter().flat_map(|folder| ["--cache-dir", folder]);
    let words = words.iter().copied().chain(cache_words).map(quoted);
    format!("{PROGRAM} {}", words.collect::<Vec<_>>().join(" "))
}

/// The command that prepares `dataset`, with `more` words.
pub fn prepare_command(dataset: &str, more: &[&str], cache_dir: Option<&Path>) -> String {
    command(&[&["prepare", "--dataset", dataset], more].concat(), cache_dir)
}

fn quoted(word: &str) -> String {
    let plain = |letter: char| letter.is_alphanumeric() || "_-./:=,+@%".contains(letter);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_the_words_that_were_meant() {
        let words =
            ["prepare", "--dataset", "my text", "it's", "", "$HOME", "a/b-c.txt", "träumerei", "~", "x\"y", "*"];
        let line = command(&words, Some(Path::new("the cache")));
        let arguments = line.strip_prefix(PROGRAM).unwrap();
        let script = format!("printf '%s\\n' {arguments}");
        let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        let expected =
            words.iter().chain(&["--cache-dir", "the cache"]).map(|word| format!("{word}\n")).collect::<String>();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
        assert!(arguments.contains(" a/b-c.txt ") && arguments.contains(" 'my text' "), "{arguments}");
    }
}
