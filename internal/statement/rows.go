package statement

import (
	"bytes"
	"cmp"
	"database/sql/driver"
	"errors"
	"io"
	"reflect"
	"slices"
	"sync"
)

// BufferBytes is how much of a query's rows is read ahead in a unit of work,
// so that code which queries inside a rows.Next loop works as it does without
// a lock. What goes beyond is streamed.
const BufferBytes = 4 << 20

// Rows are the rows of a query in a unit of work: read ahead, and where they
// are too many, with a tail that is still being read from the connection.
//
// It has every optional interface of driver.Rows. Where the base driver's rows
// lack one, the answers are those that database/sql gives in its absence.
type Rows struct {
	sets []resultSet // read ahead; the first is the current one
	next int         // the next row of the current set
	end  error       // what came in place of more rows or sets: see Fail; nil for nothing

	mu   sync.Mutex
	tail driver.Rows // what is not read yet; nil when all is
	stmt driver.Stmt // to be closed with the tail; nil for none
	err  error       // why the tail was cut off
	Done func(error) // called when the tail is over, with what went wrong; to be set before anybody has the rows
}

type resultSet struct {
	columns []column
	names   []string
	rows    [][]driver.Value
	partial bool // the tail goes on with it
	failed  bool // it ends with Rows.end
}

type column struct {
	databaseType     string
	scanType         reflect.Type
	length           int64
	hasLength        bool
	nullable         bool
	hasNullable      bool
	precision, scale int64
	hasPrecision     bool
}

var (
	_ driver.RowsNextResultSet              = (*Rows)(nil)
	_ driver.RowsColumnTypeDatabaseTypeName = (*Rows)(nil)
	_ driver.RowsColumnTypeLength           = (*Rows)(nil)
	_ driver.RowsColumnTypeNullable         = (*Rows)(nil)
	_ driver.RowsColumnTypePrecisionScale   = (*Rows)(nil)
	_ driver.RowsColumnTypeScanType         = (*Rows)(nil)
)

// ReadAhead reads base until its end, or until limit bytes are held; limit 0
// means to the end. Rows that were read to the end are closed. With an error there are
// the rows that came before it if a set of them was complete: see [Rows.Fail].
func ReadAhead(base driver.Rows, limit int) (*Rows, error) {
	r := &Rows{}
	if s, ok := base.(stmtRows); ok {
		base, r.stmt = s.Rows, s.stmt
	}
	r.tail = base
	held := 0
	for more := true; more; {
		set := describe(base)
		err := set.read(base, limit, &held)
		if err == nil || len(r.sets) > 0 {
			set.failed = err != nil
			r.sets = append(r.sets, set)
		}
		if err == nil {
			if set.partial {
				return r, nil
			}
			more, err = nextSet(base)
		}
		if err != nil {
			_ = r.Close()
			if len(r.sets) == 0 {
				r = nil
			}
			return r, err
		}
	}
	return r, r.Close()
}

// Fail has rows that ReadAhead has returned with an error end with err, as they do without
// having been read ahead; false if there are none.
func (r *Rows) Fail(err error) bool {
	if r == nil {
		return false
	}
	r.end = err
	return true
}

// read reads the rows of a set until its end, or until limit bytes are held in all.
func (rs *resultSet) read(base driver.Rows, limit int, held *int) error {
	for {
		dest := make([]driver.Value, len(rs.names))
		err := base.Next(dest)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		*held += own(dest)
		rs.rows = append(rs.rows, dest)
		if limit > 0 && *held > limit {
			rs.partial = true
			return nil
		}
	}
}

// own makes the values of a row ours, since the driver reuses its buffer, and returns
// about how many bytes they are.
func own(row []driver.Value) (bytesHeld int) {
	for i, v := range row {
		bytesHeld += 32
		switch v := v.(type) {
		case []byte:
			row[i] = bytes.Clone(v)
			bytesHeld += len(v)
		case string:
			bytesHeld += len(v)
		}
	}
	return bytesHeld
}

// nextSet goes on to the next result set; false where there is none.
func nextSet(base driver.Rows) (bool, error) {
	more, ok := base.(driver.RowsNextResultSet)
	if !ok || !more.HasNextResultSet() {
		return false, nil
	}
	if err := more.NextResultSet(); errors.Is(err, io.EOF) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	return true, nil
}

func describe(base driver.Rows) resultSet {
	set := resultSet{names: base.Columns()}
	set.columns = make([]column, len(set.names))
	for i := range set.columns {
		c := &set.columns[i]
		c.scanType = reflect.TypeFor[any]()
		if t, ok := base.(driver.RowsColumnTypeDatabaseTypeName); ok {
			c.databaseType = t.ColumnTypeDatabaseTypeName(i)
		}
		if t, ok := base.(driver.RowsColumnTypeScanType); ok {
			c.scanType = t.ColumnTypeScanType(i)
		}
		if t, ok := base.(driver.RowsColumnTypeLength); ok {
			c.length, c.hasLength = t.ColumnTypeLength(i)
		}
		if t, ok := base.(driver.RowsColumnTypeNullable); ok {
			c.nullable, c.hasNullable = t.ColumnTypeNullable(i)
		}
		if t, ok := base.(driver.RowsColumnTypePrecisionScale); ok {
			c.precision, c.scale, c.hasPrecision = t.ColumnTypePrecisionScale(i)
		}
	}
	return set
}

func (r *Rows) Columns() []string { return r.sets[0].names }

func (r *Rows) Next(dest []driver.Value) error {
	set := &r.sets[0]
	if r.next < len(set.rows) {
		copy(dest, set.rows[r.next])
		set.rows[r.next] = nil
		r.next++
		return nil
	}
	switch {
	case set.failed:
		return r.end
	case !set.partial:
		return io.EOF
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tail == nil {
		return r.cut()
	}
	err := r.tail.Next(dest)
	if err != nil && !errors.Is(err, io.EOF) {
		_ = r.finish(err)
	}
	return err
}

func (r *Rows) HasNextResultSet() bool {
	if !r.sets[0].partial {
		return len(r.sets) > 1 || r.end != nil && !r.sets[0].failed
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	more, ok := r.tail.(driver.RowsNextResultSet)
	return ok && more.HasNextResultSet()
}

func (r *Rows) NextResultSet() error {
	if !r.sets[0].partial {
		if len(r.sets) == 1 {
			return cmp.Or(r.end, io.EOF)
		}
		r.sets, r.next = r.sets[1:], 0
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	more, ok := r.tail.(driver.RowsNextResultSet)
	if !ok {
		return r.cut()
	}
	if err := more.NextResultSet(); err != nil {
		if !errors.Is(err, io.EOF) {
			_ = r.finish(err)
		}
		return err
	}
	set := describe(r.tail)
	set.partial = true
	r.sets, r.next = []resultSet{set}, 0
	return nil
}

// Close gives the connection back where rows are still being read from it. The error of
// [Rows.Fail] is told to those, too, who have not read as far.
func (r *Rows) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.end != nil {
		return r.end
	}
	return r.finish(nil)
}

// Streaming reports whether rows are still being read from the connection.
func (r *Rows) Streaming() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.tail != nil
}

// CutOff ends the tail because the connection is needed: a later Next fails
// with reason.
func (r *Rows) CutOff(reason error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tail != nil {
		r.err = reason
	}
	return r.finish(nil)
}

func (r *Rows) cut() error {
	if r.err != nil {
		return r.err
	}
	return io.EOF
}

// finish closes the tail, which cause has ended early. The caller has mu.
func (r *Rows) finish(cause error) error {
	if r.tail == nil {
		return nil
	}
	err := r.tail.Close()
	r.tail = nil
	if r.Done != nil && err == nil {
		defer func(done func(error)) { done(cause) }(r.Done)
	} else if r.Done != nil {
		defer func(done func(error)) { done(err) }(r.Done)
	}
	r.Done = nil
	if r.stmt != nil {
		err = errors.Join(err, r.stmt.Close())
		r.stmt = nil
	}
	return err
}

func (r *Rows) ColumnTypeDatabaseTypeName(i int) string { return r.sets[0].columns[i].databaseType }

func (r *Rows) ColumnTypeScanType(i int) reflect.Type { return r.sets[0].columns[i].scanType }

func (r *Rows) ColumnTypeLength(i int) (length int64, ok bool) {
	c := r.sets[0].columns[i]
	return c.length, c.hasLength
}

func (r *Rows) ColumnTypeNullable(i int) (nullable, ok bool) {
	c := r.sets[0].columns[i]
	return c.nullable, c.hasNullable
}

func (r *Rows) ColumnTypePrecisionScale(i int) (precision, scale int64, ok bool) {
	c := r.sets[0].columns[i]
	return c.precision, c.scale, c.hasPrecision
}

// Shows reports whether r has the rows of any query. A nil r has none.
func (r *Rows) Shows() bool {
	return r != nil && (r.tail != nil || slices.ContainsFunc(r.sets, func(s resultSet) bool { return len(s.names) > 0 }))
}

// Empty reports whether r are the rows of one query that has returned none.
func (r *Rows) Empty() bool {
	return r != nil && r.tail == nil && len(r.sets) == 1 && len(r.sets[0].names) > 0 && len(r.sets[0].rows) == 0
}
