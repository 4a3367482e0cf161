//! What an editable file may name: tensors and arithmetic, and nothing that reads files, the clock or the environment, or
//! keeps anything from one call to the next.
//!
//! Rust has no sandbox within a program, so that this goes by what is written. Whatever is outside the file begins with the
//! name of a crate: such paths must start with an allowed prefix, wherever they stand, and `use` cannot give them another
//! name without naming them. The arguments of macros are looked through token by token.

use proc_macro2::{Span, TokenStream, TokenTree};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;
use syn::ext::IdentExt;
use syn::visit::{self, Visit};
use syn::{
    Attribute, File, FnArg, Ident, ItemConst, ItemMod, ItemUse, Macro, Meta, Pat, PatIdent, PatType, Path, UseTree,
};

/// What stands in an editable file and must not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Violation {
    /// The file, as it was called.
    pub file: String,
    /// Its line, from 1.
    pub line: usize,
    /// What stands there.
    pub what: String,
    /// Why it must not, and what to write in its place.
    pub why: &'static str,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: expected tensors and arithmetic, found `{}`: {}", self.file, self.line, self.what, self.why)
    }
}

/// Prefixes that a path from outside the file may start with.
const PATHS: &[&str] = &[
    "crate::config::Profile",
    "crate::ops",
    "crate::optim",
    "crate::model",
    "crate::parameters",
    "burn::module::Initializer",
    "burn::module::Module",
    "burn::module::ModuleMapper",
    "burn::module::ModuleVisitor",
    "burn::module::Param",
    "burn::module::ParamGroup",
    "burn::nn",
    "burn::tensor::Bool",
    "burn::tensor::BoolDType",
    "burn::tensor::DType",
    "burn::tensor::Device",
    "burn::tensor::Distribution",
    "burn::tensor::Element",
    "burn::tensor::ElementConversion",
    "burn::tensor::Float",
    "burn::tensor::FloatDType",
    "burn::tensor::Gradients",
    "burn::tensor::IndexingUpdateOp",
    "burn::tensor::Int",
    "burn::tensor::IntDType",
    "burn::tensor::Shape",
    "burn::tensor::Slice",
    "burn::tensor::SliceArg",
    "burn::tensor::Tensor",
    "burn::tensor::TensorData",
    "burn::tensor::activation",
    "burn::tensor::assert_shape",
    "burn::tensor::bf16",
    "burn::tensor::cartesian_grid",
    "burn::tensor::debug_assert_shape",
    "burn::tensor::einsum",
    "burn::tensor::f16",
    "burn::tensor::grid",
    "burn::tensor::kind::Basic",
    "burn::tensor::kind::FloatMath",
    "burn::tensor::kind::Numeric",
    "burn::tensor::kind::Ordered",
    "burn::tensor::linalg",
    "burn::tensor::loss",
    "burn::tensor::module",
    "burn::tensor::ops",
    "burn::tensor::s",
    "anyhow::Context",
    "anyhow::Error",
    "anyhow::Ok",
    "anyhow::Result",
    "anyhow::anyhow",
    "anyhow::bail",
    "anyhow::ensure",
    "chacha20::ChaCha12Rng",
    "chacha20::ChaCha20Rng",
    "chacha20::ChaCha8Rng",
    "half::bf16",
    "half::f16",
    "rand::Rng",
    "rand::RngExt",
    "rand::SeedableRng",
    "rand::distr",
    "rand::rngs::SmallRng",
    "rand::rngs::StdRng",
    "rand::seq",
    "serde::Deserialize",
    "serde::Serialize",
];

/// Modules of `std` and `core` without input, output, time, environment, threads or interior mutability.
const STANDARD_MODULES: &[&str] = &[
    "array",
    "ascii",
    "borrow",
    "boxed",
    "char",
    "clone",
    "cmp",
    "collections",
    "convert",
    "default",
    "error",
    "f32",
    "f64",
    "fmt",
    "hash",
    "i8",
    "i16",
    "i32",
    "i64",
    "i128",
    "isize",
    "iter",
    "marker",
    "mem",
    "num",
    "ops",
    "option",
    "primitive",
    "result",
    "slice",
    "str",
    "string",
    "u8",
    "u16",
    "u32",
    "u64",
    "u128",
    "usize",
    "vec",
];

/// Macros that compute and format, assert, or end the run.
const MACROS: &[&str] = &[
    "anyhow",
    "assert",
    "assert_eq",
    "assert_ne",
    "assert_shape",
    "bail",
    "concat",
    "debug_assert",
    "debug_assert_eq",
    "debug_assert_ne",
    "debug_assert_shape",
    "einsum",
    "ensure",
    "format",
    "matches",
    "panic",
    "s",
    "stringify",
    "todo",
    "unimplemented",
    "unreachable",
    "vec",
    "write",
    "writeln",
];

/// Attributes that change no more than how code is written, shown or derived.
const ATTRIBUTES: &[&str] = &[
    "allow",
    "cfg",
    "default",
    "derive",
    "doc",
    "expect",
    "inline",
    "module",
    "must_use",
    "serde",
    "should_panic",
    "test",
];

/// Words and names that may stand nowhere.
const NAMES: &[(&str, &str)] = &[
    ("extern", WORD),
    ("macro_rules", WORD),
    ("static", WORD),
    ("unsafe", WORD),
    ("Bytes", FILES),
    ("download_file_as_bytes", FILES),
    ("from_file", FILES),
    ("load_file", FILES),
    ("save_file", FILES),
    ("try_load_file", FILES),
    ("check_closeness", PRINTS),
    ("set_print_options", STATE),
    ("BatchNorm", STATE),
    ("BatchNormConfig", STATE),
    ("Normalization", STATE),
    ("NormalizationConfig", STATE),
    ("RunningState", STATE),
    ("OsRng", SEED),
    ("SysRng", SEED),
    ("ThreadRng", SEED),
    ("deserialize_state", SEED),
    ("from_entropy", SEED),
    ("from_os_rng", SEED),
    ("from_rng", SEED),
    ("from_seed", SEED),
    ("make_rng", SEED),
    ("set_block_pos", SEED),
    ("set_stream", SEED),
    ("set_word_pos", SEED),
    ("thread_rng", SEED),
    ("try_from_os_rng", SEED),
    ("try_from_rng", SEED),
    ("HashMap", ORDER),
    ("HashSet", ORDER),
    ("RandomState", ORDER),
];

/// Methods, and other names behind `.` or `::`, of burn's modules and devices.
const MEMBERS: &[(&str, &str)] = &[
    ("load", FILES),
    ("save", FILES),
    ("profile", CLOCK),
    ("profile_with", CLOCK),
    ("performance_stats", CLOCK),
    ("configure", STATE),
    ("seed", SEED),
    ("capture_scope", STATE),
];

/// Keywords that `!(…)` may follow without being a macro.
const BEFORE_NOT: &[&str] = &["break", "else", "if", "in", "match", "move", "return", "while"];

const PATH: &str = "this path may lead to files, the clock or the environment; hint: use crate::{ops, optim, model, parameters}, burn::nn, the parts of burn::module and burn::tensor that compute, or what std has for plain values";
const FILES: &str = "it reaches files; hint: the program itself writes checkpoints";
const PRINTS: &str = "it prints; hint: the program itself reports what it measured";
const CLOCK: &str = "it tells the time; hint: schedules are given the share of the budget that is spent";
const STATE: &str = "it keeps something from one call to the next; hint: hand values on as arguments and fields";
const SEED: &str = "random numbers must come from the given seed alone, or another seed could pass for a gain; hint: write seed_from_u64(seed), with the parameter `seed` as it is, outside of macros, and call other values otherwise";
const ORDER: &str = "its order changes from run to run; hint: use a BTreeMap or a BTreeSet";
const WORD: &str = "it goes around what the compiler guarantees, or keeps something from one call to the next; hint: write plain functions of tensors";
const MACRO: &str =
    "it may print, read or define anything; hint: use assert!, ensure!, bail!, format!, vec! and the like";
const ATTRIBUTE: &str = "it may change what is compiled or linked; hint: leave it out";
const CONDITION: &str = "what is compiled must be what is read; hint: only cfg(test) is taken";
const OTHER_FILE: &str = "it takes in another file; hint: write its content here";
const HIDDEN: &str = "names that start with two underscores are for macros alone; hint: use what they belong to";
const UNREADABLE: &str = "this is Rust that the check cannot read; hint: write it in a plainer way";

/// The crates that a path may start with: the dependencies, and what comes with Rust.
static CRATES: LazyLock<Vec<String>> = LazyLock::new(|| {
    let manifest: toml::Table = toml::from_str(include_str!("../../Cargo.toml")).expect("cargo has read it");
    let tables = ["dependencies", "dev-dependencies"].map(|name| manifest[name].as_table().expect("a table"));
    let dependencies = tables.into_iter().flat_map(|table| table.keys()).map(|name| name.replace('-', "_"));
    let others = ["std", "core", "alloc", "proc_macro", "test", env!("CARGO_CRATE_NAME")];
    dependencies.chain(others.map(str::to_owned)).collect()
});

/// Refuses `source`, called `name`, if it could do more than compute with tensors.
///
/// A file that is no Rust passes: the compiler says better what is wrong with it. What the compiler has taken is for
/// [`check_built`].
///
/// # Errors
/// The first [`Violation`] by line.
pub fn check(name: &str, source: &str) -> Result<(), Violation> {
    match parse(source) {
        Ok((tokens, file)) => look_through(name, tokens, &file),
        Err(_) => Ok(()),
    }
}

/// [`check`] of a file that has been compiled: one that cannot be read here is refused, too.
///
/// # Errors
/// As [`check`].
pub fn check_built(name: &str, source: &str) -> Result<(), Violation> {
    let (tokens, file) = parse(source).map_err(|error| Violation {
        file: name.to_owned(),
        line: error.span().start().line,
        what: error.to_string().replace('\n', " "),
        why: UNREADABLE,
    })?;
    look_through(name, tokens, &file)
}

/// The file as tokens and as syntax.
fn parse(source: &str) -> syn::Result<(TokenStream, File)> {
    // As the compiler does: without a byte order mark and a first line for the shell, which still counts as one.
    let source = source.strip_prefix('\u{feff}').unwrap_or(source);
    let is_script = source.starts_with("#!") && !source[2..].trim_start().starts_with('[');
    let source = if is_script { &source[source.find('\n').unwrap_or(source.len())..] } else { source };
    let tokens: TokenStream = source.parse()?;
    Ok((tokens.clone(), syn::parse2(tokens)?))
}

fn look_through(name: &str, tokens: TokenStream, file: &File) -> Result<(), Violation> {
    let mut reader = Reader { modules: 0, found: BTreeMap::new() };
    reader.scan_names(tokens);
    reader.visit_file(file);
    match reader.found.pop_first() {
        None => Ok(()),
        Some((line, (what, why))) => Err(Violation { file: name.to_owned(), line, what, why }),
    }
}

/// Goes through a file and notes what must not be there.
struct Reader {
    /// Modules of the file around the place that is looked at.
    modules: usize,
    /// By line; the first of each.
    found: BTreeMap<usize, (String, &'static str)>,
}

impl Reader {
    fn refuse(&mut self, span: Span, what: &str, why: &'static str) {
        self.found.entry(span.start().line).or_insert_with(|| (what.to_owned(), why));
    }

    /// Checks a whole path, or the whole path that a `use` names.
    fn check_path(&mut self, segments: &[String], span: Span) {
        let is_outside = match segments.first().map_or("", String::as_str) {
            "crate" => true,
            "self" | "super" => {
                let steps = segments.iter().take_while(|name| ["self", "super"].contains(&name.as_str()));
                steps.filter(|name| *name == "super").count() > self.modules
            }
            first => CRATES.iter().any(|name| name == first),
        };
        if is_outside && !is_allowed(segments) {
            self.refuse(span, &segments.join("::"), PATH);
        }
    }

    fn check_macro(&mut self, name: &str, span: Span) {
        if !MACROS.contains(&name) {
            self.refuse(span, &format!("{name}!"), MACRO);
        }
    }

    /// Looks for names that may stand nowhere, macros' arguments included.
    fn scan_names(&mut self, tokens: TokenStream) {
        // The punctuation right before a token.
        let mut marks = String::new();
        let mut tokens = tokens.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match &token {
                TokenTree::Group(group) => self.scan_names(group.stream()),
                // 'static is no static.
                TokenTree::Ident(ident) if !marks.ends_with('\'') => {
                    let name = text(ident);
                    let is_member = marks.ends_with("::") || (marks.ends_with('.') && !marks.ends_with(".."));
                    let members = if is_member { MEMBERS } else { &[] };
                    if let Some((_, why)) = NAMES.iter().chain(members).find(|(refused, _)| *refused == name) {
                        self.refuse(ident.span(), &name, why);
                    } else if name == "seed_from_u64" && !tokens.peek().is_some_and(is_the_seed) {
                        self.refuse(ident.span(), &name, SEED);
                    } else if name.starts_with("__") {
                        self.refuse(ident.span(), &name, HIDDEN);
                    }
                }
                _ => {}
            }
            match &token {
                TokenTree::Punct(mark) => marks.push(mark.as_char()),
                _ => marks.clear(),
            }
        }
    }

    /// Looks for paths, macros and imports in what a macro or an attribute is given.
    fn scan_arguments(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let is =
            |at: usize, mark: char| matches!(tokens.get(at), Some(TokenTree::Punct(found)) if found.as_char() == mark);
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token {
                TokenTree::Group(group) => self.scan_arguments(group.stream()),
                TokenTree::Ident(first) => {
                    let mut segments = vec![text(first)];
                    while is(at, ':')
                        && is(at + 1, ':')
                        && let Some(TokenTree::Ident(next)) = tokens.get(at + 2)
                    {
                        segments.push(text(next));
                        at += 3;
                    }
                    let is_macro = is(at, '!') && matches!(tokens.get(at + 1), Some(TokenTree::Group(_)));
                    if is_macro && !BEFORE_NOT.contains(&segments[0].as_str()) {
                        self.check_macro(&segments[segments.len() - 1], first.span());
                    }
                    if segments.iter().any(|name| name == "seed_from_u64") {
                        self.refuse(first.span(), &segments.join("::"), SEED);
                    } else if segments.len() > 1 {
                        self.check_path(&segments, first.span());
                    } else if ["use", "mod"].contains(&segments[0].as_str()) {
                        self.refuse(first.span(), &segments[0], MACRO);
                    }
                }
                _ => {}
            }
        }
    }
}

fn is_allowed(segments: &[String]) -> bool {
    match segments {
        [root, module, ..] if root == "std" || root == "core" => STANDARD_MODULES.contains(&module.as_str()),
        _ => PATHS.iter().any(|prefix| {
            let prefix: Vec<&str> = prefix.split("::").collect();
            segments.len() >= prefix.len() && prefix.iter().zip(segments).all(|(expected, found)| expected == found)
        }),
    }
}

/// Whether `arguments` are nothing but `seed`.
fn is_the_seed(arguments: &TokenTree) -> bool {
    matches!(arguments, TokenTree::Group(group) if group.stream().to_string() == "seed")
}

/// `name` without the mark of raw names.
fn text(name: &Ident) -> String {
    name.unraw().to_string()
}

impl Reader {
    /// Refuses paths in the texts of an attribute: macros make code of them.
    fn check_texts(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => self.check_texts(group.stream()),
                TokenTree::Literal(literal) => {
                    let span = literal.span();
                    if let Ok(text) = syn::parse2::<syn::LitStr>(TokenTree::from(literal).into())
                        && text.value().contains("::")
                    {
                        self.refuse(span, &text.value().escape_debug().to_string(), PATH);
                    }
                }
                _ => {}
            }
        }
    }

    /// Checks each path that a `use` names; `a::*` and `a::{self}` name `a`.
    fn check_use(&mut self, tree: &UseTree, before: &mut Vec<String>) {
        let depth = before.len();
        match tree {
            UseTree::Path(path) => {
                before.push(text(&path.ident));
                self.check_use(&path.tree, before);
            }
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.check_use(tree, before)),
            UseTree::Glob(glob) => self.check_path(before, glob.star_token.spans[0]),
            UseTree::Name(syn::UseName { ident }) | UseTree::Rename(syn::UseRename { ident, .. }) => {
                if matches!(tree, UseTree::Rename(rename) if text(&rename.rename) == "seed") {
                    self.refuse(ident.span(), "seed", SEED);
                }
                if depth == 0 || ident != "self" {
                    before.push(text(ident));
                }
                self.check_path(before, ident.span());
            }
        }
        before.truncate(depth);
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_path(&mut self, path: &'ast Path) {
        let segments: Vec<String> = path.segments.iter().map(|segment| text(&segment.ident)).collect();
        // A single name is one of the file's, or the start of nothing.
        if let [first, _, ..] = &path.segments.iter().collect::<Vec<_>>()[..] {
            self.check_path(&segments, first.ident.span());
        }
        visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        item.attrs.iter().for_each(|attribute| self.visit_attribute(attribute));
        self.check_use(&item.tree, &mut Vec::new());
    }

    /// A parameter may be called `seed`, if it is not changed.
    fn visit_fn_arg(&mut self, argument: &'ast FnArg) {
        match argument {
            FnArg::Typed(PatType { pat, ty, .. }) if matches!(&**pat, Pat::Ident(PatIdent { ident, mutability: None, .. }) if text(ident) == "seed") =>
            {
                self.visit_type(ty);
            }
            _ => visit::visit_fn_arg(self, argument),
        }
    }

    /// Nothing else may: it could hide the parameter.
    fn visit_pat_ident(&mut self, pattern: &'ast PatIdent) {
        if text(&pattern.ident) == "seed" {
            self.refuse(pattern.ident.span(), "seed", SEED);
        }
        visit::visit_pat_ident(self, pattern);
    }

    fn visit_item_const(&mut self, item: &'ast ItemConst) {
        if text(&item.ident) == "seed" {
            self.refuse(item.ident.span(), "seed", SEED);
        }
        visit::visit_item_const(self, item);
    }

    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if item.content.is_none() {
            self.refuse(item.ident.span(), &format!("mod {};", item.ident), OTHER_FILE);
        }
        self.modules += 1;
        visit::visit_item_mod(self, item);
        self.modules -= 1;
    }

    fn visit_macro(&mut self, invocation: &'ast Macro) {
        if let Some(last) = invocation.path.segments.last() {
            self.check_macro(&text(&last.ident), last.ident.span());
        }
        self.visit_path(&invocation.path);
        self.scan_arguments(invocation.tokens.clone());
    }

    /// What syn does not take apart: rare and new syntax.
    fn visit_token_stream(&mut self, tokens: &'ast TokenStream) {
        self.scan_arguments(tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        let path = attribute.path();
        let name = path.get_ident().map(text).unwrap_or_default();
        match &attribute.meta {
            _ if !ATTRIBUTES.contains(&name.as_str()) => {
                let segments: Vec<String> = path.segments.iter().map(|segment| text(&segment.ident)).collect();
                self.refuse(attribute.pound_token.span, &format!("#[{}]", segments.join("::")), ATTRIBUTE);
            }
            Meta::List(list) if name == "cfg" && list.tokens.to_string() != "test" => {
                self.refuse(attribute.pound_token.span, &format!("#[cfg({})]", list.tokens), CONDITION);
            }
            // Lints have paths of their own.
            Meta::List(_) if ["allow", "expect"].contains(&name.as_str()) => {}
            Meta::List(list) => {
                self.scan_arguments(list.tokens.clone());
                self.check_texts(list.tokens.clone());
            }
            Meta::NameValue(pair) => self.visit_expr(&pair.value),
            Meta::Path(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: &str = include_str!("../model.rs");
    const OPTIM: &str = include_str!("../optim.rs");

    /// The shipped model file with `new` in place of `old`, and the line of that.
    fn edited(old: &str, new: &str) -> (String, usize) {
        assert_eq!(MODEL.matches(old).count(), 1, "{old}");
        let line = MODEL[..MODEL.find(old).unwrap()].matches('\n').count() + 1;
        (MODEL.replace(old, new), line)
    }

    #[test]
    fn the_shipped_files_pass() {
        assert_eq!(check_built("src/model.rs", MODEL), Ok(()));
        assert_eq!(check_built("src/optim.rs", OPTIM), Ok(()));
    }

    #[test]
    fn honest_edits_pass() {
        let mlp = "self.c_proj.forward(ops::squared_relu(self.c_fc.forward(x)))";
        let edits = [
            (
                mlp,
                "let gate = burn::tensor::activation::silu(self.gate.forward(x.clone()));\n self.c_proj.forward(gate * self.c_fc.forward(x))",
            ),
            (
                mlp,
                "use burn::tensor::activation::{self, gelu};\n self.c_proj.forward(activation::relu(gelu(self.c_fc.forward(x))))",
            ),
            (
                "use crate::ops;",
                "use crate::ops::{self, rms_norm};\nuse burn::nn::{self, Dropout, loss::*};\nuse std::collections::BTreeMap as Map;",
            ),
            (
                "    lm_head: Linear,\n    resid",
                "    lm_head: Linear,\n    rank: [burn::tensor::Slice; 2],\n    norm: burn::nn::LayerNorm,\n    v_lambdas: Param<Tensor<1>>,\n    resid",
            ),
            (
                "const SOFTCAP: f64 = 15.0;",
                "const SOFTCAP: f64 = 3.0 * std::f64::consts::PI;\nfn half(x: f32) -> f32 { f32::max(x, core::cmp::min(1, 2) as f32) / 2.0 }",
            ),
            (
                "const SOFTCAP: f64 = 15.0;",
                "const SOFTCAP: f64 = 15.0;\nconst NAMES: &'static [&'static str] = &[\"std::fs\"]; // std::fs::read, unsafe, static",
            ),
            (
                "const SOFTCAP: f64 = 15.0;",
                "const SOFTCAP: f64 = 15.0;\nmod parts { use super::SOFTCAP; use rand::RngExt; pub(super) fn cap() -> f64 { self::double(super::SOFTCAP) } fn double(x: f64) -> f64 { 2.0 * x } }",
            ),
            (
                "        let [_, t] = tokens.dims();\n",
                "        let [_, t] = tokens.dims();\n        assert!(!(t == 0) && if !(t > 1) { true } else { t != (2) }, \"{}\", format!(\"{:?}\", Vec::<std::num::NonZero<u8>>::new()));\n",
            ),
            (
                "        let [_, t] = tokens.dims();\n",
                "        let [_, t] = tokens.dims();\n        let (profile, load) = (1, 2); for i in 0..load { let p = Schedule { profile: profile, seed: i }; }\n",
            ),
        ];
        for (old, new) in edits {
            assert_eq!(check_built("src/model.rs", &edited(old, new).0), Ok(()), "{new}");
        }
    }

    #[test]
    fn tricks_are_refused_with_their_line() {
        let tricks = [
            // Files, the clock, the environment, other crates.
            ("use std::fs;", "std::fs"),
            ("use std::{collections::BTreeMap, time::Instant};", "std::time::Instant"),
            ("fn a() { let _ = std::fs::read(\"x\"); }", "std::fs::read"),
            ("fn a() { let _ = ::std::env::var(\"x\"); }", "std::env::var"),
            ("fn a() { let _ = <std::time::Instant>::now(); }", "std::time::Instant"),
            ("fn a(x: impl AsRef<std::path::Path>) {}", "std::path::Path"),
            ("fn a() { let _ = r#std::r#fs::read(\"x\"); }", "std::fs::read"),
            ("fn a() { let _ = core::cell::Cell::new(1); }", "core::cell::Cell::new"),
            ("fn a() { let _ = tempfile::tempdir(); }", "tempfile::tempdir"),
            ("fn a() { let _ = serde_json::from_str::<u8>(\"1\"); }", "serde_json::from_str"),
            ("use crate::data::prepared::Prepared;", "crate::data::prepared::Prepared"),
            ("use crate::config::Config;", "crate::config::Config"),
            ("use crate::{ops::{self as o}, train};", "crate::train"),
            ("fn a() { let _ = crate::tokenizer::Tokenizer::default; }", "crate::tokenizer::Tokenizer::default"),
            ("use burn::store::ModuleRecord;", "burn::store::ModuleRecord"),
            ("use burn::prelude::*;", "burn::prelude"),
            ("use burn::Tensor as T;", "burn::Tensor"),
            ("fn a() { burn::tensor::Bytes::from_file(\"x\", 0, 1); }", "Bytes"),
            ("fn a(data: TensorData) { let mut it = data.into_bytes(); it = from_file(\"x\", 0, 1); }", "from_file"),
            ("use burn::tensor::*;", "burn::tensor"),
            ("use burn::tensor as t;", "burn::tensor"),
            ("fn a() { burn::tensor::try_read_sync(x); }", "burn::tensor::try_read_sync"),
            ("use burn::tensor::{self, Shape};", "burn::tensor"),
            ("use burn::module::*;", "burn::module"),
            ("fn a(x: Tensor<2>) { burn::tensor::check_closeness(&x, &x); }", "check_closeness"),
            ("fn a(config: burn::nn::LinearConfig) { config.save(\"x\"); }", "save"),
            ("use burn::nn::{Linear, BatchNorm};", "BatchNorm"),
            ("use rand::rng;", "rand::rng"),
            // Seeds that are not the given one.
            ("fn a() { ChaCha8Rng::seed_from_u64(7); }", "seed_from_u64"),
            ("fn a(seed: u64) { ChaCha8Rng::seed_from_u64(seed + 1); }", "seed_from_u64"),
            ("fn a(seed: u64) { ChaCha8Rng::seed_from_u64({ seed ^ 1 }); }", "seed_from_u64"),
            ("fn a() { let a = [7].map(ChaCha8Rng::seed_from_u64); }", "seed_from_u64"),
            ("fn a(seed: u64) { let seed = seed + 1; ChaCha8Rng::seed_from_u64(seed); }", "seed"),
            ("fn a(mut seed: u64) { seed = 7; ChaCha8Rng::seed_from_u64(seed); }", "seed"),
            ("fn a() { [7].map(|seed| ChaCha8Rng::seed_from_u64(seed)); }", "seed"),
            ("fn a() { for (seed, _) in [(7, 8)] { ChaCha8Rng::seed_from_u64(seed); } }", "seed"),
            ("const seed: u64 = 7;", "seed"),
            ("use self::SOFTCAP as seed;", "seed"),
            ("fn a() { vec![{ let seed = 7; ChaCha8Rng::seed_from_u64(seed) }]; }", "ChaCha8Rng::seed_from_u64"),
            ("fn a() { ChaCha8Rng::from_seed([7; 32]); }", "from_seed"),
            ("fn a(mut b: ChaCha8Rng) { ChaCha8Rng::from_rng(&mut b); }", "from_rng"),
            ("fn a(mut b: ChaCha8Rng) { b.set_stream(7); }", "set_stream"),
            ("fn a(device: Device) { device.seed(7); }", "seed"),
            ("fn a() { rand::random::<u8>(); }", "rand::random"),
            ("use rand::rngs::ThreadRng;", "ThreadRng"),
            ("use chacha20::rand_core;", "chacha20::rand_core"),
            // Other names for the same.
            ("use std as s;", "std"),
            ("use {std as s};", "std"),
            ("use crate as c;", "crate"),
            ("use crate::{self as c};", "crate"),
            ("use std::*;", "std"),
            ("use crate::*;", "crate"),
            ("use super::data;", "super::data"),
            ("use self::super::data;", "self::super::data"),
            ("mod inner { use super::super::data; }", "super::super::data"),
            ("pub(in super::super) fn a() {}", "super::super"),
            ("extern crate std as s;", "extern"),
            // A value of a crate's name does not hide the crate.
            (
                "mod inner { pub fn tempfile() {} } use inner::tempfile; fn a() { tempfile::tempdir(); }",
                "tempfile::tempdir",
            ),
            ("anyhow::__private::format_err!(\"\");", "__private"),
            // Syntax that is not taken apart.
            ("pub macro a() { std::fs::read(\"x\") }", "std::fs::read"),
            ("fn a(x: [u8; std::process::id()]);", "std::process::id"),
            ("use {::std::fs as f};", "use"),
            ("fn a() { let a = builtin # offset_of(std::fs::File, x); }", "std::fs::File"),
            // Around the compiler, and state between calls.
            ("fn a() { unsafe { } }", "unsafe"),
            ("unsafe fn a() {}", "unsafe"),
            ("extern \"C\" { fn time(x: *mut i64) -> i64; }", "extern"),
            ("static mut CALLS: usize = 0;", "static"),
            ("fn a() { static CALLS: u8 = 0; }", "static"),
            ("thread_local! { }", "thread_local!"),
            ("use burn::module::RunningState;", "RunningState"),
            ("fn a(model: Gpt) { model.load_file(\"x\"); }", "load_file"),
            ("fn a(model: Gpt) { model.into_record().save(\"x\"); }", "save"),
            ("fn a(device: Device) { device.profile(|| ()); }", "profile"),
            ("fn a(device: Device) { Device::profile(&device, || ()); }", "profile"),
            ("fn a() { std::collections::HashMap::<u8, u8>::new(); }", "HashMap"),
            // Macros and attributes.
            ("macro_rules! a { () => { std::fs } }", "macro_rules"),
            ("fn a() { println!(\"val_bpb: 0\"); }", "println!"),
            ("fn a() { std::println!(\"\"); }", "println!"),
            ("fn a() { tracing::warn!(\"\\nval_bpb: 0\"); }", "warn!"),
            ("use tracing::warn;", "tracing::warn"),
            ("const A: &str = include_str!(\"x\");", "include_str!"),
            ("fn a() -> Option<&'static str> { option_env!(\"HOME\") }", "option_env!"),
            ("fn a() { assert!(std::fs::exists(\"x\").unwrap()); }", "std::fs::exists"),
            ("fn a() { format!(\"{}\", vec![::std::env::args()]); }", "std::env::args"),
            ("fn a() { assert!({ use std as ops; ops::fs::exists(\"x\") }); }", "use"),
            ("fn a() { vec![include_bytes!(\"x\")]; }", "include_bytes!"),
            ("fn a() { vec![unsafe { 1 }]; }", "unsafe"),
            ("#[path = \"x.rs\"] mod a {}", "#[path]"),
            ("mod a;", "mod a;"),
            ("#[unsafe(no_mangle)] fn a() {}", "#[unsafe]"),
            ("#[export_name = \"main\"] fn a() {}", "#[export_name]"),
            ("#[cfg_attr(all(), path = \"x.rs\")] mod a {}", "#[cfg_attr]"),
            ("#[cfg(not(test))] fn a() {}", "#[cfg(not (test))]"),
            ("#[cfg(feature = \"tch\")] fn a() {}", "#[cfg(feature = \"tch\")]"),
            ("#[derive(tracing::Nothing)] struct A;", "tracing::Nothing"),
            ("#[derive(Deserialize)] struct A { #[serde(default = \"std::process::id\")] a: u32 }", "std::process::id"),
            ("#[doc = include_str!(\"x\")] struct A;", "include_str!"),
        ];
        for (trick, what) in tricks {
            let (source, line) = edited("const SOFTCAP: f64 = 15.0;", &format!("const SOFTCAP: f64 = 15.0;\n{trick}"));
            let found = check("src/model.rs", &source).expect_err(trick);
            // `unsafe` in an attribute is found as a word.
            assert_eq!(
                (found.line, found.what.trim_matches(&['#', '[', ']'][..])),
                (line + 1, what.trim_matches(&['#', '[', ']'][..])),
                "{trick}"
            );
            let message = found.to_string();
            assert!(message.starts_with(&format!("src/model.rs:{}: ", line + 1)), "{message}");
            assert!(message.contains("; hint: ") && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn the_first_violation_is_named() {
        let source = "fn a() { dbg!(1); }\n\nuse std::fs;\nfn b() { unsafe {} }\n";
        let found = check("src/optim.rs", source).unwrap_err();
        assert_eq!((found.file.as_str(), found.line, found.what.as_str()), ("src/optim.rs", 1, "dbg!"));
    }

    #[test]
    fn what_is_no_rust_is_left_to_the_compiler_and_refused_once_that_has_taken_it() {
        for source in ["fn a( {", "fn a() { let = 1; }\nuse std::fs;", "\"", "use std::fs; fn a() { \u{0} }"] {
            assert_eq!(check("src/model.rs", source), Ok(()), "{source}");
            let found = check_built("src/model.rs", source).unwrap_err().to_string();
            assert!(found.starts_with("src/model.rs:") && !found.contains('\n'), "{found}");
        }
    }

    #[test]
    fn what_the_compiler_skips_at_the_start_hides_nothing() {
        for start in ["\u{feff}", "#!/bin/sh", "\u{feff}#!/bin/sh", "#![allow(unused)]", "#! [allow(unused)]"] {
            let found = check("src/model.rs", &format!("{start}\nuse std::fs;\n")).expect_err(start);
            assert_eq!((found.line, found.what.as_str()), (2, "std::fs"), "{start}");
        }
    }

    #[test]
    fn every_dependency_is_known_by_name() {
        for name in ["tempfile", "serde_json", "burn_tch", "proc_macro2", "fancy_regex", "std", "autoresearch"] {
            assert!(CRATES.iter().any(|known| known == name), "{name}");
        }
    }
}
