package record

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// file is a file of events, and the one before it.
type file struct {
	path string
	most int64 // bytes of each of the two
	size int64
	to   *os.File
}

// older is the name of the file before the one at path.
func older(path string) string { return path + ".1" }

func openFile(path string, most int64) (*file, error) {
	to, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600) // keys and accounts are not for everybody
	if err != nil {
		return nil, err
	}
	info, err := to.Stat()
	if err != nil {
		to.Close()
		return nil, err
	}
	return &file{path, most, info.Size(), to}, nil
}

func (f *file) close() { _ = f.to.Close() }

// append writes the events by one write. turned says that a new file was begun after them.
func (f *file) append(events []Event) (turned bool, err error) {
	var b bytes.Buffer
	for _, e := range events {
		line, err := json.Marshal(e)
		if err != nil {
			return false, err
		}
		b.Write(append(line, '\n'))
	}
	n, err := f.to.Write(b.Bytes())
	if f.size += int64(n); err != nil {
		return false, fmt.Errorf("writing the record: %w", err)
	}
	if f.size < f.most {
		return false, nil
	}
	if err := f.to.Close(); err != nil {
		return false, err
	}
	if err := os.Rename(f.path, older(f.path)); err != nil {
		return false, err
	}
	next, err := openFile(f.path, f.most)
	if err != nil {
		return false, err
	}
	*f = *next
	return true, nil
}

// Read calls visit with each event of the record at path, the oldest first. A line that was cut off, as by a full
// disk, is left out.
func Read(path string, visit func(Event)) error {
	found := false
	for _, name := range []string{older(path), path} {
		from, err := os.Open(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		found = true
		lines := bufio.NewReader(from)
		for {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				break // at the end, perhaps in a line that is being written
			}
			var e Event
			if json.Unmarshal(line, &e) == nil {
				visit(e)
			}
		}
		from.Close()
	}
	if !found {
		return fmt.Errorf("there is no record at %s: mysqllock record --to %[1]s makes one", path)
	}
	return nil
}
