//! Documents in parquet shards, streamed: one open row group, of which a batch of rows is decoded at a time.

use anyhow::{Context, Result, anyhow, bail};
use arrow_array::RecordBatch;
use arrow_array::cast::AsArray;
use arrow_schema::DataType;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Rows that are decoded at once.
const DECODED_ROWS: usize = 1024;

/// The text column of some parquet files, row group after row group.
pub struct ParquetShards {
    shards: Vec<PathBuf>,
    column: String,
    groups: Vec<Group>,
    cursor: Mutex<Option<Cursor>>,
}

/// A row group, or the part of one that belongs to the split.
#[derive(Clone, Copy)]
struct Group {
    shard: usize,
    row_group: usize,
    first_row: usize,
    length: usize,
}

/// Where reading has got to: an open row group and the rows of it that are decoded.
struct Cursor {
    shard: usize,
    file: File,
    metadata: ArrowReaderMetadata,
    group: usize,
    rows: ParquetRecordBatchReader,
    first_decoded: usize,
    decoded: Vec<Arc<str>>,
}

impl ParquetShards {
    /// All rows of `shards`, in the given order.
    ///
    /// # Errors
    /// If a file cannot be read, is no complete parquet file, or has no text in `column`.
    pub fn open(shards: Vec<PathBuf>, column: &str) -> Result<Self> {
        Self::open_rows(shards, column, 0..usize::MAX)
    }

    /// The rows within `rows`, counted over all `shards`.
    ///
    /// # Errors
    /// As for [`ParquetShards::open`].
    pub fn open_rows(shards: Vec<PathBuf>, column: &str, rows: Range<usize>) -> Result<Self> {
        let mut groups = Vec::new();
        let mut start = 0;
        for (shard, path) in shards.iter().enumerate() {
            let (_, metadata) = open_shard(path)?;
            text_column(path, &metadata, column)?;
            for (row_group, description) in metadata.metadata().row_groups().iter().enumerate() {
                let length = usize::try_from(description.num_rows())
                    .with_context(|| damaged(path, &format!("row group {row_group} has a negative length")))?;
                let first = rows.start.clamp(start, start + length);
                let last = rows.end.clamp(start, start + length);
                if first < last {
                    groups.push(Group { shard, row_group, first_row: first - start, length: last - first });
                }
                start += length;
            }
        }
        Ok(Self { shards, column: column.to_string(), groups, cursor: Mutex::new(None) })
    }

    /// Documents in each group, in order; none is 0.
    pub fn group_lengths(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|group| group.length)
    }

    /// The text of row `row` of group `group`; a null is an empty text.
    ///
    /// # Errors
    /// If the file cannot be read or decoded.
    pub fn document(&self, group: usize, row: usize) -> Result<Arc<str>> {
        // A panic while decoding leaves the cursor taken out, so a poisoned lock guards nothing half-done.
        let mut place = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        let mut cursor = match place.take() {
            Some(cursor) if cursor.group == group && cursor.reaches(row) => cursor,
            other => self.seek(other, group, row)?,
        };
        if row >= cursor.first_decoded + cursor.decoded.len() {
            self.decode_next(&mut cursor)?;
        }
        let text = cursor.decoded.get(row - cursor.first_decoded).cloned();
        let path = &self.shards[cursor.shard];
        *place = Some(cursor);
        text.ok_or_else(|| anyhow!(damaged(path, "a row group is shorter than the footer says")))
    }

    /// Opens a row group at `row`; the shard's file and footer are kept where they are the same.
    fn seek(&self, cursor: Option<Cursor>, group: usize, row: usize) -> Result<Cursor> {
        let Group { shard, row_group, first_row, length } = self.groups[group];
        let path = &self.shards[shard];
        let (file, metadata) = match cursor {
            Some(cursor) if cursor.shard == shard => (cursor.file, cursor.metadata),
            _ => open_shard(path)?,
        };
        let column = text_column(path, &metadata, &self.column)?;
        let mask = ProjectionMask::roots(metadata.parquet_schema(), [column]);
        let input = file.try_clone().map_err(|error| anyhow!(damaged(path, &error.to_string())))?;
        let rows = ParquetRecordBatchReaderBuilder::new_with_metadata(input, metadata.clone())
            .with_row_groups(vec![row_group])
            .with_projection(mask)
            .with_batch_size(DECODED_ROWS)
            .with_offset(first_row + row)
            .with_limit(length - row)
            .build()
            .map_err(|error| anyhow!(damaged(path, &error.to_string())))?;
        Ok(Cursor { shard, file, metadata, group, rows, first_decoded: row, decoded: Vec::new() })
    }

    fn decode_next(&self, cursor: &mut Cursor) -> Result<()> {
        let path = &self.shards[cursor.shard];
        cursor.first_decoded += cursor.decoded.len();
        cursor.decoded.clear();
        if let Some(batch) = cursor.rows.next() {
            let batch = batch.map_err(|error| anyhow!(damaged(path, &error.to_string())))?;
            cursor.decoded = texts(path, &self.column, &batch)?;
        }
        Ok(())
    }
}

impl Cursor {
    /// Whether `row` is decoded or comes with the next batch.
    fn reaches(&self, row: usize) -> bool {
        row >= self.first_decoded && row < self.first_decoded + self.decoded.len() + DECODED_ROWS
    }
}

/// Whether `path` is a parquet file with a whole footer, as it is not after an interrupted copy.
pub fn is_complete(path: &Path) -> bool {
    open_shard(path).is_ok()
}

fn open_shard(path: &Path) -> Result<(File, ArrowReaderMetadata)> {
    let file = File::open(path).map_err(|error| {
        anyhow!("{}: cannot be opened ({error}); hint: prepare this data set again", path.display())
    })?;
    // Without the arrow schema that a writer may have embedded, every kind of string column arrives as Utf8 or Binary.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let metadata =
        ArrowReaderMetadata::load(&file, options).map_err(|error| anyhow!(damaged(path, &error.to_string())))?;
    Ok((file, metadata))
}

/// The position of `column` among the file's columns.
fn text_column(path: &Path, metadata: &ArrowReaderMetadata, column: &str) -> Result<usize> {
    let fields = metadata.schema().fields();
    let Some((position, field)) = fields.find(column) else {
        let found = fields.iter().map(|field| field.name().as_str()).collect::<Vec<_>>().join(", ");
        bail!(
            "{}: expected a column `{column}`, found the columns: {found}; hint: rename the column that holds the text to `{column}`",
            path.display()
        );
    };
    match field.data_type() {
        DataType::Utf8 | DataType::Binary => Ok(position),
        other => bail!(
            "{}: expected text in the column `{column}`, found {other}; hint: write the column as strings",
            path.display()
        ),
    }
}

fn texts(path: &Path, column: &str, batch: &RecordBatch) -> Result<Vec<Arc<str>>> {
    let array = batch.column(0);
    if let Some(strings) = array.as_string_opt::<i32>() {
        return Ok(strings.iter().map(|text| Arc::from(text.unwrap_or(""))).collect());
    }
    let Some(binaries) = array.as_binary_opt::<i32>() else {
        bail!(damaged(path, &format!("the column `{column}` holds {}", array.data_type())));
    };
    binaries
        .iter()
        .map(|bytes| match std::str::from_utf8(bytes.unwrap_or(b"")) {
            Ok(text) => Ok(Arc::from(text)),
            Err(error) => bail!(
                "{}: expected UTF-8 in the column `{column}`, found {error}; hint: write the column as strings",
                path.display()
            ),
        })
        .collect()
}

fn damaged(path: &Path, found: &str) -> String {
    format!(
        "{}: expected a complete parquet file, found: {found}; hint: delete the file and prepare the data set again",
        path.display()
    )
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::data::documents::Documents;
    use arrow_array::types::Int32Type;
    use arrow_array::{
        ArrayRef, BinaryArray, DictionaryArray, Int64Array, LargeBinaryArray, LargeStringArray, StringArray,
        StringViewArray,
    };
    use burn_dataset::Dataset;
    use parquet::arrow::ArrowWriter;
    use parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
    use parquet::file::properties::WriterProperties;
    use std::fs;

    const ROW_GROUP: usize = 7;

    fn write_column(path: &Path, name: &str, texts: ArrayRef, compression: Compression) {
        let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(0..texts.len() as i64));
        let batch = RecordBatch::try_from_iter_with_nullable([("id", numbers, false), (name, texts, true)]).unwrap();
        let properties = WriterProperties::builder()
            .set_max_row_group_row_count(Some(ROW_GROUP))
            .set_compression(compression)
            .build();
        let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
    }

    /// Writes a shard with these texts in the column `text`.
    pub(crate) fn write_shard(path: &Path, texts: &[Option<&str>]) {
        write_column(path, "text", Arc::new(StringArray::from(texts.to_vec())), Compression::SNAPPY);
    }

    fn documents(path: &Path) -> Documents {
        Documents::from_parquet(ParquetShards::open(vec![path.to_path_buf()], "text").unwrap())
    }

    fn read(documents: &Documents) -> Vec<String> {
        documents.iter().map(|text| text.unwrap().to_string()).collect()
    }

    fn numbered(count: usize) -> Vec<String> {
        (0..count).map(|number| format!("text {number} ä")).collect()
    }

    fn refusal(path: &Path) -> String {
        let message = ParquetShards::open(vec![path.to_path_buf()], "text").err().expect("refused").to_string();
        assert!(message.starts_with(path.to_str().unwrap()), "{message}");
        assert!(message.contains("expected ") && message.contains("hint: ") && !message.contains('\n'), "{message}");
        message
    }

    #[test]
    fn every_codec_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard.parquet");
        let texts = numbered(20);
        for codec in [
            Compression::UNCOMPRESSED,
            Compression::SNAPPY,
            Compression::GZIP(GzipLevel::default()),
            Compression::ZSTD(ZstdLevel::default()),
            Compression::BROTLI(BrotliLevel::default()),
            Compression::LZ4_RAW,
            Compression::LZ4,
        ] {
            write_column(&path, "text", Arc::new(StringArray::from(texts.clone())), codec);
            assert_eq!(read(&documents(&path)), texts, "{codec:?}");
        }
    }

    #[test]
    fn every_kind_of_string_column_is_read_and_a_null_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard.parquet");
        let texts = [Some("one"), None, Some(""), Some("two"), Some("one")];
        let bytes = texts.map(|text| text.map(str::as_bytes));
        let columns: [ArrayRef; 6] = [
            Arc::new(StringArray::from(texts.to_vec())),
            Arc::new(LargeStringArray::from(texts.to_vec())),
            Arc::new(StringViewArray::from(texts.to_vec())),
            Arc::new(texts.into_iter().collect::<DictionaryArray<Int32Type>>()),
            Arc::new(BinaryArray::from(bytes.to_vec())),
            Arc::new(LargeBinaryArray::from(bytes.to_vec())),
        ];
        for column in columns {
            let kind = column.data_type().clone();
            write_column(&path, "text", column, Compression::SNAPPY);
            assert_eq!(read(&documents(&path)), ["one", "", "", "two", "one"], "{kind}");
        }
    }

    #[test]
    fn groups_are_row_groups_and_any_order_of_reading_works() {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["a.parquet", "b.parquet"].map(|name| folder.path().join(name));
        let texts = numbered(30);
        let column = |range: Range<usize>| Arc::new(StringArray::from(texts[range].to_vec()));
        write_column(&paths[0], "text", column(0..16), Compression::SNAPPY);
        write_column(&paths[1], "text", column(16..30), Compression::SNAPPY);
        let shards = ParquetShards::open(paths.to_vec(), "text").unwrap();
        assert_eq!(shards.group_lengths().collect::<Vec<_>>(), [7, 7, 2, 7, 7]);
        let documents = Documents::from_parquet(shards);
        for step in [1, 7, 11, 29] {
            for place in 0..30 {
                let index = place * step % 30;
                assert_eq!(*documents.get(index).unwrap(), *texts[index], "step {step}");
            }
        }
    }

    #[test]
    fn long_row_groups_are_decoded_in_parts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard.parquet");
        let texts = numbered(3 * DECODED_ROWS + 5);
        let column: ArrayRef = Arc::new(StringArray::from(texts.clone()));
        let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
        let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        let shards = ParquetShards::open(vec![path], "text").unwrap();
        assert_eq!(shards.group_lengths().collect::<Vec<_>>(), [texts.len()]);
        let documents = Documents::from_parquet(shards);
        assert_eq!(read(&documents), texts);
        for index in [5, 4, 2 * DECODED_ROWS, 3 * DECODED_ROWS + 4, DECODED_ROWS - 1, DECODED_ROWS, 3 * DECODED_ROWS] {
            assert_eq!(*documents.get(index).unwrap(), *texts[index], "{index}");
        }
    }

    #[test]
    fn a_range_of_rows_may_cut_row_groups() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard.parquet");
        let texts = numbered(30);
        write_column(&path, "text", Arc::new(StringArray::from(texts.clone())), Compression::SNAPPY);
        for rows in [0..5, 5..9, 7..14, 10..30, 29..100, 30..40] {
            let shards = ParquetShards::open_rows(vec![path.clone()], "text", rows.clone()).unwrap();
            let documents = Documents::from_parquet(shards);
            assert_eq!(read(&documents), texts[rows.start.min(30)..rows.end.min(30)], "{rows:?}");
        }
    }

    #[test]
    fn a_missing_column_is_named_with_those_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard.parquet");
        write_column(&path, "body", Arc::new(StringArray::from(vec!["a"])), Compression::SNAPPY);
        assert!(refusal(&path).contains("expected a column `text`, found the columns: id, body"));
    }

    #[test]
    fn a_column_of_numbers_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard.parquet");
        write_column(&path, "text", Arc::new(Int64Array::from(vec![1])), Compression::SNAPPY);
        assert!(refusal(&path).contains("expected text in the column `text`, found Int64"));
    }

    #[test]
    fn truncated_and_foreign_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard.parquet");
        write_shard(&path, &[Some("text"); 50]);
        assert!(is_complete(&path));
        let whole = fs::read(&path).unwrap();
        for length in [0, 3, 8, whole.len() / 2, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            refusal(&path);
            assert!(!is_complete(&path));
        }
        fs::write(&path, "just text, long enough to hold a footer").unwrap();
        refusal(&path);
    }

    #[test]
    fn damage_within_a_shard_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard.parquet");
        let texts = numbered(20);
        write_column(&path, "text", Arc::new(StringArray::from(texts)), Compression::GZIP(GzipLevel::default()));
        let mut bytes = fs::read(&path).unwrap();
        let footer = bytes.len() - 8 - u32::from_le_bytes(bytes[bytes.len() - 8..][..4].try_into().unwrap()) as usize;
        bytes[4..footer].fill(0xff);
        fs::write(&path, bytes).unwrap();
        let message = documents(&path).get(0).unwrap_err().to_string();
        assert!(message.starts_with(path.to_str().unwrap()) && message.contains("hint: "), "{message}");
    }

    #[test]
    fn bytes_that_are_not_utf8_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard.parquet");
        write_column(&path, "text", Arc::new(BinaryArray::from(vec![&b"caf\xe9"[..]])), Compression::SNAPPY);
        let message = documents(&path).get(0).unwrap_err().to_string();
        assert!(message.contains("expected UTF-8 in the column `text`"), "{message}");
    }
}
