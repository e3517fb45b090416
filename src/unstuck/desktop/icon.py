"""Draw the icon: nothing to install beside the code, and sharp in every size."""

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QIcon, QPainter, QPainterPath, QPen, QPixmap

SIZES_PX = (16, 22, 24, 32, 48, 64, 128)
GROUND, INK, ALARM = QColor("#1f4e79"), QColor("white"), QColor("#e03131")


def draw_icon(alarmed: bool = False) -> QIcon:
    """A "U" on blue; with a red dot while there is bad news that nobody has looked at."""
    icon = QIcon()
    for size_px in SIZES_PX:
        icon.addPixmap(_draw(size_px, alarmed))
    return icon


def _draw(size_px: int, alarmed: bool) -> QPixmap:
    pixmap = QPixmap(size_px, size_px)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.scale(size_px / 32, size_px / 32)
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(GROUND)
    painter.drawRoundedRect(QRectF(1, 1, 30, 30), 7, 7)
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.setPen(QPen(INK, 4.5, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap))
    letter = QPainterPath(QPointF(10, 8))
    letter.lineTo(10, 17)
    letter.arcTo(QRectF(10, 11, 12, 13), 180, 180)
    letter.lineTo(22, 8)
    painter.drawPath(letter)
    if alarmed:
        painter.setPen(QPen(INK, 1.5))
        painter.setBrush(ALARM)
        painter.drawEllipse(QPointF(24, 8), 6.5, 6.5)
    painter.end()
    return pixmap
