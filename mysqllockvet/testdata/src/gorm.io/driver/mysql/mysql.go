// Package mysql has the names of the real one, for the tests.
package mysql

type Config struct{ DriverName, DSN string }

type Dialector struct{}

func (*Dialector) Name() string    { return "" }
func Open(dsn string) *Dialector   { return nil }
func New(config Config) *Dialector { return nil }
